"""What a check is, and what it is given: a method on one network, by plain code or by the engine."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from petal.checks.attributes import alike
from petal.checks.factory import Factory
from petal.checks.networks import NETWORKS, images, network
from petal.engine import Policy, accelerate
from petal.errors import ConfigError, PetalError, PetalWarning
from petal.methods import Adapter, SmallBatch, Wrapper

ENGINES = ("plain", "engine")
LONGEST = 16                # batches within which a method has to learn something


class CheckFailed(PetalError, AssertionError):
    """A method does not do what every method does. The message says what is wrong and what to do."""


class NotApplicable(PetalError):
    """A check that has no meaning for a method or a network, and why."""


class Subject:
    """A method on one network, by plain code or by the engine. Gives adapters, and answers to made batches."""

    def __init__(self, factory: Factory, name: str, engine: bool) -> None:
        self.factory, self.name, self.engine = factory, name, engine

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The network."""
        return network(self.name, dtype)

    def takes(self, option: str) -> bool:
        """True if the method has this setting."""
        return self.factory.takes(option)

    def new(self, model: nn.Module | None = None, **options: object) -> Adapter:
        """An adapter as it begins, with those of the options that the method has."""
        adapter = self.factory(self.model() if model is None else model, **options)
        if not isinstance(adapter, Adapter):
            raise CheckFailed(f"the factory gave {type(adapter).__name__}: a method is a class derived from petal.Adapter")
        return accelerate(adapter, policy=Policy()) if self.engine else adapter

    def batches(self, first: int, count: int) -> list[Tensor]:
        """Batches of 12 images from number `first` on."""
        return [images(seed=number) for number in range(first, first + count)]

    def run(self, adapter: Adapter, first: int, count: int) -> list[Tensor]:
        """Answers to `count` batches of 12 images from number `first` on."""
        return [self.answer(adapter, number) for number in range(first, first + count)]

    def answer(self, adapter: Adapter, number: int, size: int = 12) -> Tensor:
        """The answer to a batch. Torch's own random numbers are the same each time: one check is about them."""
        torch.manual_seed(number)
        logits: Tensor = adapter(images(size, seed=number))
        return logits

    @cached_property
    def period(self) -> int:
        """Batches until something that adapts has moved; 0 if nothing does."""
        adapter = self.new()
        for number in range(1, LONGEST + 1) if adapter.adapted else ():
            self.answer(adapter, number)
            if any(not torch.equal(p, adapter.origin()[name]) for name, p in adapter.adapted.items()):
                return number
        return 0

    @property
    def some(self) -> int:
        """So many batches that the method has learned from at least one, and then seen another."""
        return max(self.period + 1, 2)

    @cached_property
    def refusal(self) -> str:
        """Why the method does not take this network; empty if it does."""
        try:
            self.new()
        except ConfigError as error:
            return str(error)
        return ""

    def learning(self) -> None:
        """Not applicable unless something adapts."""
        require_meaning(bool(self.new().adapted), "nothing adapts")

    def option(self, name: str) -> None:
        """Not applicable unless the method has this setting."""
        require_meaning(self.takes(name), f"the constructor has no {name}")


Body = Callable[[Subject], None]
REGISTRY: dict[str, tuple[Body, tuple[str, ...]]] = {}


def check(name: str, *engines: str) -> Callable[[Body], Body]:
    """Enter a function as a check, which its docstring describes, for plain code and engine or for those named."""

    def enter(body: Body) -> Body:
        REGISTRY[name] = body, engines or ENGINES
        return body

    return enter


@dataclass(frozen=True)
class Check:
    """One check of one method on one network. Call it: it returns, or raises `CheckFailed` or `NotApplicable`."""

    name: str
    description: str
    network: str
    engine: str                                         # "plain" or "engine"
    body: Body = field(repr=False)
    subject: Subject = field(repr=False)
    others: Sequence[Subject] = field(repr=False)       # the method on all networks

    def __call__(self) -> None:
        """Make the check."""
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore", PetalWarning)       # of a guard that sees what a check does
                torch.manual_seed(0)
                self._admit()
                self.body(self.subject)
        except (CheckFailed, NotApplicable):
            raise
        except Exception as error:
            raise CheckFailed(f"{type(error).__name__}: {error}{_where(error)}") from error

    def __str__(self) -> str:
        return f"{self.name} [{self.network}, {self.engine}]"

    def _admit(self) -> None:
        refusal = self.subject.refusal
        if refusal and all(subject.refusal for subject in self.others):
            raise CheckFailed(f"the method takes none of the networks, so that nothing was checked: {refusal}")
        require_meaning(not refusal, refusal)


def check_method(
    method: Callable[..., Adapter], networks: Sequence[str] = NETWORKS, engines: Sequence[str] = ENGINES
) -> Iterator[Check]:
    """The checks of a method: a class, a function from a network to an adapter, or a `Factory` with settings.

    Nothing runs until a check is called. For pytest: `@pytest.mark.parametrize("check", check_method(Mine), ids=str)`.

    >>> import petal
    >>> for check in check_method(petal.Tent, networks=["vit"], engines=["plain"]):
    ...     if check.name in ("answers", "reset"):
    ...         check()
    """
    factory = method if isinstance(method, Factory) else Factory(method)
    subjects = {(name, engine): Subject(factory, name, engine == "engine") for name in networks for engine in engines}
    for name, (body, wanted) in REGISTRY.items():
        description = (body.__doc__ or "").strip().splitlines()[0]
        for (where, engine), subject in subjects.items():
            if engine in wanted:
                others = [other for (_, kind), other in subjects.items() if kind == engine]
                yield Check(name, description, where, engine, body, subject, others)


# What checks say


def require(condition: bool, message: str) -> None:
    """Fail with a message unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def require_meaning(condition: bool, reason: str) -> None:
    """Not applicable, for a reason, unless the condition holds."""
    if not condition:
        raise NotApplicable(reason)


def same_answers(expected: Sequence[Tensor], got: Sequence[Tensor], message: str, tolerance: float = 0.0) -> None:
    """Fail unless the answers are the same: to the bit, or within a share of the largest logit."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True), start=1):
        if one.shape != other.shape:
            raise CheckFailed(f"{message} (shape {list(other.shape)} instead of {list(one.shape)})")
        far = float((one - other).abs().max())
        if not (alike(one, other) or far <= tolerance * max(1.0, float(one.abs().max()))):
            raise CheckFailed(f"{message} (batch {number} of {len(expected)}, largest difference {far:.2g})")


def same_state(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], message: str, *leave_out: str) -> None:
    """Fail unless two states are the same to the bit, but for what the keys left out begin with."""
    keys = [key for key in dict.fromkeys([*expected, *got]) if not key.startswith(leave_out or ("\0",))]
    names = [key for key in keys if key not in expected or key not in got or not alike(expected[key], got[key])]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise CheckFailed(f"{message} (in the state: {', '.join(names[:4])}{more})")


def layers(adapter: Adapter) -> list[Adapter]:
    """An adapter and what is inside it, from the outermost wrapper to the method."""
    return [adapter, *layers(adapter.adapter)] if isinstance(adapter, Wrapper) else [adapter]


def at_once(adapter: Adapter) -> None:
    """Not applicable where a batch has another meaning the second time: in the small-batch mode, and where order counts."""
    require_meaning(not adapter.ordered, "answers depend on the order of all images so far")
    small = any(isinstance(layer, SmallBatch) for layer in layers(adapter))
    require_meaning(not small, "the small-batch mode learns from its memory, at its own pace")


def _where(error: Exception) -> str:
    """The last line of the user's own code in a traceback."""
    packages = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(packages)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
