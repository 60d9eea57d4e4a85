"""What goes around a method: an adapter that hands on to another one all it does not do itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from petal.errors import ConfigError
from petal.methods.base import Adapter
from petal.methods.descent import Descent
from petal.methods.executor import Executor
from petal.methods.state import misfits
from petal.norm import shared_copy
from petal.order import Keys


class Wrapper(Adapter):
    """An adapter around another, `adapter`. Networks, device, counters and settings are the inner one's.

    A subclass writes `forward` and, if it keeps a state of its own, `own_state`, `check_own_state`, `load_own_state` and
    `reset_own`. Its keys in the whole state begin with `prefix`; the inner adapter's keep their names.
    """

    adapter: Adapter
    prefix: str
    inner: ClassVar[bool] = False       # part of how the method learns: `SmallBatch` may go around it

    def __init__(self, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        if not isinstance(adapter, Adapter):
            raise ConfigError(f"{type(self).__name__} goes around a method (petal.Petal), got {type(adapter).__name__}")
        self.adapter = adapter
        self.training = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("adapter"), name)

    @property
    def kind(self) -> str:
        """The class with that of the adapter inside, for example Guard(Petal)."""
        return f"{type(self).__name__}({self.adapter.kind})"

    @property
    def descent(self) -> Descent | None:  # type: ignore[override]
        """The inner adapter's: counters and optimizer are read through it."""
        return self.adapter.descent

    @property
    def method(self) -> Adapter:
        """The method at the core, whatever goes around it."""
        return self.adapter.method if isinstance(self.adapter, Wrapper) else self.adapter

    @contextmanager
    def handing_on(self, changed: Callable[[Tensor], Tensor] = lambda logits: logits) -> Iterator[None]:
        """In here the answers that the adapter inside gives early are given early by this one, `changed` as its own are.

        A wrapper's `forward` says so; without it the answer is what `forward` returns, after learning.
        """
        if self._receive is None:
            yield
            return
        with self.adapter.answering(lambda logits: self._hand_out(changed(logits))):
            yield

    @property
    def short_of_memory(self) -> int:  # type: ignore[override]
        """Updates that the method did not make since memory ran out."""
        return self.method.short_of_memory

    def execute_with(self, executor: Executor | None) -> None:
        """Executors belong to the method inside (`petal.accelerate` goes there by itself)."""
        self.adapter.execute_with(executor)

    def step(self, x: Tensor) -> Tensor:
        """One step of the method inside."""
        return self.adapter.step(x)

    def corrected(self, logits: Tensor) -> Tensor:
        """The answer as the method inside corrects it."""
        return self.adapter.corrected(logits)

    def snapshot(self) -> dict[str, Tensor | None]:
        """Copies of the declared state of the method inside."""
        return self.adapter.snapshot()

    def rewind(self, snapshot: Mapping[str, Tensor | None]) -> None:
        """Put the declared state of the method inside back."""
        self.adapter.rewind(snapshot)

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch with the weights as they are."""
        return self.adapter.predict(x, stream)

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """True if answers use the order of the stream."""
        return self.adapter.ordered

    def observe(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer a batch without learning."""
        return self.adapter.observe(x, stream)

    def vitals(self) -> dict[str, float]:
        """Those of the adapter inside; a subclass adds its own."""
        return self.adapter.vitals()

    def glance(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer a batch that there is no time to learn from; what follows the stream besides weights goes on."""
        return self.observe(x, stream)

    def describe(self) -> dict[str, str]:
        """What the adapter inside does; a subclass adds itself."""
        return self.adapter.describe()

    def origin(self) -> dict[str, Tensor]:
        """The adapted parameters as they were after construction, by name."""
        return self.adapter.origin()

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits of a batch with these parameters in the place of the network's own."""
        return self.adapter.logits_with(parameters, x)

    def load_weights(self, weights: Mapping[str, Tensor], fresh: bool = True) -> None:
        """Put all that adapts to these values and go on, with a fresh optimizer or the one there is."""
        self.adapter.load_weights(weights, fresh)

    def weights(self) -> dict[str, Tensor]:
        """The tensors that adapt, by name in the state."""
        return self.adapter.weights()

    def inner_shape(self, shape: Sequence[int] | None) -> Sequence[int] | None:
        """The shape of the batches that the inner adapter gets, if it is called with this one."""
        return shape

    def freeze(self) -> None:
        """Stop learning: calls predict with the weights as they are, until `thaw`."""
        self.adapter.freeze()

    def thaw(self) -> None:
        """Learn again."""
        self.adapter.thaw()

    def reset(self) -> None:
        """Back to the state after construction, inside and out."""
        self.adapter.reset()
        self.reset_own()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The inner adapter's state and one's own, as a flat dict of tensor copies."""
        return self.adapter.state_dict(*args, **kwargs) | {self.prefix + k: v for k, v in self.own_state().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Continue from `state_dict` exactly; one that does not fit is refused and changes nothing."""
        inner, own = self._split(state_dict)
        problems = self.check_own_state(own)
        if problems:
            raise ConfigError(f"this state does not fit {self.kind}: {'; '.join(problems[:10])}")
        self.adapter.load_state_dict(inner, strict, assign)
        self.load_own_state(own)

    def kept(self) -> dict[str, Tensor]:
        """What a guard keeps copies of: that of the inner adapter, and one's own."""
        return self.adapter.kept() | {self.prefix + k: v for k, v in self.own_kept().items()}

    def check_kept(self, kept: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with names and shapes of something kept."""
        inner, own = self._split(kept)
        return self.adapter.check_kept(inner) + self.check_own_state(own)

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from something kept."""
        inner, own = self._split(kept)
        self.adapter.put_back(inner)
        self.load_own_state(own)

    def _split(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {k.removeprefix(self.prefix): v for k, v in state.items() if k.startswith(self.prefix)}
        return {k: v for k, v in state.items() if not k.startswith(self.prefix)}, own

    # The state of the wrapper itself

    def own_kept(self) -> dict[str, Tensor]:
        """What a guard keeps of one's own state."""
        return self.own_state()

    def own_state(self) -> dict[str, Tensor]:
        """Copies of the tensors that the wrapper itself changes."""
        return {}

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with a state of one's own: names and shapes, against what there is now."""
        mine, theirs = ({self.prefix + k: v for k, v in values.items()} for values in (self.own_state(), state))
        return misfits(mine, theirs)

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state of one's own."""

    def reset_own(self) -> None:
        """Back to the state after construction."""


def check_learner(wrapper: str, adapter: Adapter) -> None:
    """Raise a ConfigError unless all that a method learns is in the weights that adapt, its optimizer and declared state."""
    reasons = {
        "it is wrapped already: go directly around the method": isinstance(adapter, Wrapper),
        "it adapts nothing": not adapter.adapted,
        f"it keeps networks that follow the weights ({', '.join(adapter._following)})": bool(adapter._following),
        "its running statistics move": bool(adapter._buffers_start),
        "it forgets everything with every batch (episodic)": adapter.episodic,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"{wrapper} makes no sense around {adapter.kind}: {reason}")


def beginning(adapter: Adapter) -> nn.Module:
    """The network as it was after construction, frozen; what does not adapt is shared with the adapter's own."""
    with torch.inference_mode(False):
        first = {name: nn.Parameter(value, requires_grad=False) for name, value in adapter.origin().items()}
        return shared_copy(adapter.model, {id(adapter.adapted[name]): value for name, value in first.items()})
