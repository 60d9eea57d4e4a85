"""A network as the step of a method runs it, and the views of a batch that it may average over: plain torch.

`petal.accelerate` puts networks with the same methods in the place of these.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.calls import called, check_logits, given, logits_in, parts, shapes, taken
from petal.errors import InputError
from petal.methods.work import Work


class Network:
    """A module with the weights it runs on. Calls build a graph for gradients if they are enabled and its weights adapt."""

    def __init__(self, module: nn.Module, work: Work | None = None) -> None:
        self.module, self.work = module, work or Work()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, C] of a batch."""
        logits = logits_of(self.module, x)
        self.work.ran(logits)
        return logits

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the last linear layer is given [N, D], and the logits [N, C]."""
        with Recorder(self.module) as recorder:
            logits = logits_of(self.module, x)
            features = recorder.taken()
        self.work.ran(features, logits)
        return features, logits

    def over(self, views: "ViewSource", average: str) -> Tensor:
        """The mean prediction over views: of the logits, or of the probabilities ("probs"), as their logarithm."""
        return mean_over(views.predicted(self), views.count, average)

    def each(self, views: "ViewSource", wanted: Sequence[int]) -> Iterator[Tensor]:
        """Logits of the views with these numbers, in order. All are drawn, so that random numbers stay in step."""
        return (self(view) for view in self.made(views, wanted))

    def made(self, views: "ViewSource", wanted: Sequence[int]) -> Iterator[Tensor]:
        """The views with these numbers, in order."""
        return (views.make(drawn) for number, drawn in enumerate(views.draws()) if number in wanted)


def logits_of(module: Any, x: Tensor) -> Tensor:
    """Logits [N, C]; an input that the network cannot take is an InputError."""
    return outputs_of(module, x)[-1]


def outputs_of(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Logits [N, C] alone or after features, checked."""
    found = called(module, x)
    if isinstance(found, Features):
        return found.features, check_logits(found.logits, x)
    return (check_logits(logits_in(found), x),)


class Features(NamedTuple):
    """What the last linear layer is given [N, D], and the logits [N, C]."""

    features: Tensor
    logits: Tensor


class Recorder:
    """Keeps what the last linear layer to run was given, while it is open."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        self.last: nn.Module | None = None
        self.input: Tensor | None = None

    def __enter__(self) -> "Recorder":
        self.handles = [layer.register_forward_pre_hook(self._keep) for layer in self.layers]
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.last, self.input = layer, inputs[0]

    def taken(self) -> Tensor:
        """The features; an InputError if no linear layer was run on a batch of vectors."""
        if self.input is None or self.input.dim() != 2:
            raise InputError("features are what the last linear layer is given, and this network ends in none")
        return self.input


def last_layer(module: nn.Module, x: Tensor) -> str:
    """The name of the last linear layer to run on a batch."""
    with torch.no_grad(), Recorder(module) as recorder:
        logits_of(module, x)
        recorder.taken()
    names = {layer: name for name, layer in module.named_modules()}
    return names[recorder.last] if recorder.last is not None else ""


class Sharing(Protocol):
    """How processes share out the views of a batch (see `petal.parallel`)."""

    def decided(self, needed: Tensor) -> Tensor:
        """Which samples need views, the same for all processes."""
        ...

    def computes(self, view: int) -> bool:
        """True if a view is this process's to compute."""
        ...

    def gathered(self, mine: list[Tensor], views: int) -> Tensor:
        """The predictions of all views, in their order, from this process's own."""
        ...


class ViewSource:
    """The K views of a batch: random numbers drawn in order, and views made of them.

    An augmentation of the user's own is called exactly K times, in order, on the whole batch; what it returns is the view
    itself. One that takes a `generator` gets the method's.
    """

    def __init__(
        self, x: Tensor, augment: Augment, count: int, generator: torch.Generator, sharing: Sharing | None = None
    ) -> None:
        self.x, self.augment, self.count, self.generator, self.sharing = x, augment, count, generator, sharing
        self.views = augment if type(augment) is Views else None
        self.images = x
        if self.views is not None:
            self.views.check(x)
            self.images = self.views.pixels(x)

    def draw(self) -> Any:
        """What the next view is made of."""
        return self.called() if self.views is None else self.views.draw(self.images, self.generator)

    def draws(self) -> Iterator[Any]:
        """What each view is made of, in order."""
        return (self.draw() for _ in range(self.count))

    def make(self, drawn: Any) -> Tensor:
        """The view [N, ...] that the random numbers mean."""
        return drawn if self.views is None else self.views.as_given(self.views.apply(self.images, *drawn), self.x)

    def called(self) -> Tensor:
        """One view by calling the augmentation."""
        x: Any = given(self.x)
        view: Any = self.augment(x, generator=self.generator) if takes_generator(self.augment) else self.augment(x)  # type: ignore[call-arg]
        view = taken(view)
        if likeness(view) != likeness(self.x):
            raise InputError(f"augment must return a batch like its input {described(self.x)}, got {described(view)}")
        return view  # type: ignore[no-any-return]

    def predicted(self, network: Network) -> Iterable[Tensor]:
        """A network's logits of each view, in order; where processes share the views out, those of all of them."""
        if self.sharing is None:
            return network.each(self, range(self.count))
        mine = [number for number in range(self.count) if self.sharing.computes(number)]
        found = self.sharing.gathered([logits.clone() for logits in network.each(self, mine)], self.count)
        network.work.forwards += (self.count - len(mine)) * len(found[0])           # the others', as of one process
        return found


def mean_over(predictions: Iterable[Tensor], count: int, average: str) -> Tensor:
    """The mean of logits, or of probabilities as their logarithm, added up in order; each before the next is made."""
    total: Tensor | None = None
    for logits in predictions:
        if average == "logits":
            total = logits.clone() if total is None else total.add_(logits)
        else:
            logits = logits.log_softmax(1)
            total = logits if total is None else torch.logaddexp(total, logits, out=total)
    assert total is not None
    return total / count if average == "logits" else total - math.log(count)


def described(x: Any) -> str:
    """Shape, type and device of a batch, for messages."""
    return f"{list(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else shapes(x)


def likeness(x: Any) -> Any:
    """What a batch and its views have in common."""
    return {
        name: (t.shape, t.dtype, t.device) if isinstance(t, Tensor) else type(t) for name, t in parts(x).items()
    }


def takes_generator(augment: Augment) -> bool:
    """True if an augmentation can be given a `generator`."""
    try:
        return "generator" in inspect.signature(augment).parameters
    except (TypeError, ValueError):
        return False
