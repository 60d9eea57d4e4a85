"""Checks of how a method learns: that it does, from finite losses alone, by its settings, and on the engine as off it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from petal.checks.attributes import alike, attributes
from petal.checks.networks import images
from petal.checks.state import hint
from petal.checks.suite import (
    LONGEST,
    CheckFailed,
    Subject,
    at_once,
    check,
    goes_on_from_batch_to_batch,
    layers,
    require,
    require_meaning,
    same_answers,
    same_state,
)
from petal.engine import Policy, accelerate
from petal.errors import ConfigError, InputError
from petal.methods import Adapter
from petal.methods.descent import Descent

SMOOTH = 1e-2               # an optimizer's eps: without one, Adam makes full steps of the rounding of gradients near zero


@check("learns")
def learns(subject: Subject) -> None:
    """Some of what it adapts moves."""
    subject.learning()
    require(subject.period > 0, f"in {LONGEST} batches of 12 images nothing moved: call self.descend(loss) in step")


@check("loss not finite")
def loss_not_finite(subject: Subject) -> None:
    """A loss that is not finite is counted in `skipped`, and nothing is learned from it."""
    subject.learning()
    wanted = list[bool]()

    def spoil(loss: Tensor, when: Any) -> tuple[Tensor, Any]:
        wanted.append(bool(when))
        return loss * float("nan"), when

    for begun in (subject.some, 0):                             # later on a method may find nothing to learn from
        adapter, twin = subject.new(), subject.new()
        subject.run(adapter, 0, begun), subject.run(twin, 0, begun)
        _redirect(adapter, spoil)
        _redirect(twin, lambda loss, when: (loss, False))       # a batch without anything to learn from
        before = adapter.skipped
        for number in range(30 if begun else 0, 30 + LONGEST):
            subject.run(adapter, number, 1), subject.run(twin, number, 1)
            if any(wanted):
                break
        if any(wanted):
            break
    advice = "take steps by self.descend(loss), and let what follows a step be given to it (after=[...])"
    require(adapter.skipped > before, f"losses that are not finite were not counted in skipped: {advice}")
    expected, got = ({k: v for k, v in each.weights().items() if isinstance(v, nn.Parameter)} for each in (twin, adapter))
    same_state(expected, got, f"weights moved by a loss that is not finite: {advice}")


@check("weights not finite")
def weights_not_finite(subject: Subject) -> None:
    """Weights that are not finite spoil nothing else: once they are put right, it goes on."""
    subject.learning()
    adapter = subject.new()
    goes_on_from_batch_to_batch(adapter)
    subject.run(adapter, 0, subject.some)
    with torch.no_grad():
        broken = next(reversed(adapter.adapted.values()))
        kept = broken.clone()
        broken.fill_(float("inf"))
    method = layers(adapter)[-1]
    before = {key: value.clone() for key, value in adapter.weights().items() if isinstance(value, nn.Parameter)}
    subject.run(adapter, 40, subject.period)
    require_meaning(not getattr(adapter, "alarms", ()), "a guard has seen it and put the weights back")
    same_state(before, {key: adapter.weights()[key] for key in before}, "weights moved by a loss that is not finite")
    with torch.no_grad():
        broken.copy_(kept)
    begun = layers(subject.new())[-1].state_dict()          # what begins at infinity may be there still
    spoilt = [key for key, v in method.state_dict().items() if v.is_floating_point() and not v.isfinite().all()
              and not (key in begun and alike(v, begun[key]))]  # fmt: skip
    advice = "change what is declared only where the prediction is finite, for example by torch.where(made, new, old)"
    require(not spoilt, f"{', '.join(spoilt[:4])} took in answers that are not finite, and stays so: {advice}")
    twin = subject.new()
    twin.load_state_dict(adapter.state_dict())
    message = hint(attributes(adapter), twin, "something of a batch that was skipped is in a later step")
    expected, got = (subject.run(each, 60, subject.some) for each in (twin, adapter))
    same_answers(expected, got, message)
    same_state(layers(twin)[-1].state_dict(), method.state_dict(), message)


@check("steps")
def steps(subject: Subject) -> None:
    """With steps=2 a batch does what it does with steps=1 when given twice."""
    subject.option("steps")
    once, twice = subject.new(), subject.new(steps=2)
    at_once(once)
    goes_on_from_batch_to_batch(once)
    x = images()
    torch.manual_seed(0)
    once(x)
    second = once(x)
    torch.manual_seed(0)
    first = twice(x)
    same_answers([second], [first], "steps=2 gives another answer than two calls: leave the loop to Adapter.forward")
    same_state(layers(once)[-1].state_dict(), layers(twice)[-1].state_dict(), "steps=2 leads elsewhere than two calls")


@check("episodic")
def episodic(subject: Subject) -> None:
    """With episodic=True every batch begins afresh, whatever came before it."""
    subject.option("episodic")
    try:
        adapter = subject.new(episodic=True, steps=2)
    except ConfigError as error:
        require_meaning("episodic" not in str(error), str(error))       # what goes around a method may refuse it
        raise
    at_once(adapter)
    random = adapter.generator.get_state()
    first = subject.answer(adapter, 1)
    subject.answer(adapter, 2)
    adapter.generator.set_state(random)
    advice = "declare what changes by register_state, so that the base class can put it back"
    same_answers([first], [subject.answer(adapter, 1)], f"an earlier batch is in a later episode: {advice}")
    before = adapter.state_dict()
    try:
        adapter(images()[:, :2])
    except InputError:
        same_state(before, adapter.state_dict(), "a refused batch begins an episode")


@check("optimizer")
def optimizer(subject: Subject) -> None:
    """The optimizer that is given is the one that steps; its settings come with a state."""
    subject.option("optimizer")

    def sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)

    adapter, own = subject.new(optimizer=sgd, lr=0.01), subject.new(lr=0.01)
    made = adapter.optimizer
    require(isinstance(made, torch.optim.SGD), f"optimizer= is ignored, there is {type(made).__name__}: give it to adapt()")
    subject.run(adapter, 0, subject.some), subject.run(own, 0, subject.some)
    moved = any(not torch.equal(p, own.adapted[name]) for name, p in adapter.adapted.items())
    require(moved, "another optimizer leads to the same weights: take steps by self.descend(loss)")
    goes_on_from_batch_to_batch(adapter)
    state = adapter.state_dict()
    expected = subject.run(adapter, 30, subject.some)
    other = subject.new(optimizer=sgd, lr=0.5)
    other.load_state_dict(state)
    same_answers(expected, subject.run(other, 30, subject.some), "with a loaded state another learning rate is used")


@check("settings", "plain")
def settings(subject: Subject) -> None:
    """Learning rates and numbers of steps without meaning are refused by name."""
    wrong: dict[str, tuple[Any, ...]] = {
        "lr": (-1.0, float("nan"), float("inf"), "fast", True), "steps": (0, -1, 1.5), "seed": (-1, 0.5)
    }  # fmt: skip
    require_meaning(any(map(subject.takes, wrong)), "the constructor has none of them")
    for name, values in wrong.items():
        for value in values if subject.takes(name) else ():
            try:
                subject.new(**{name: value})
            except ConfigError as error:
                require(name in str(error), f"the error for {name}={value!r} does not name it: {error}")
            else:
                raise CheckFailed(f"{name}={value!r} is accepted: hand {name} on to the base class, or use check_number")


@check("engine like plain", "engine")
def engine_like_plain(subject: Subject) -> None:
    """`petal.accelerate` gives the answers, weights and state of the plain code, but for rounding."""
    plain, fast = (_smooth(subject.factory(subject.model())) for _ in range(2))
    accelerate(fast, policy=Policy())
    numbers = list(range(subject.some + 2))
    advice = "run networks by self.logits and self.features, and step by self.descend"
    for number in numbers:
        size = 5 if number == numbers[-2] else 12
        pair = [subject.answer(plain, number, size)], [subject.answer(fast, number, size)]
        same_answers(*pair, f"on the engine batch {number} gets another answer: {advice}", 1e-3)
    require(plain.skipped == fast.skipped, f"plain code skips {plain.skipped} steps and the engine {fast.skipped}: {advice}")
    _same_within_rounding(plain, fast, advice)
    plain.load_state_dict(fast.state_dict())
    pair = [subject.answer(plain, 40)], [subject.answer(fast, 40)]
    same_answers(*pair, f"plain code does not go on from the engine's state: {advice}", 1e-3)


def _same_within_rounding(plain: Adapter, fast: Adapter, advice: str) -> None:
    """Weights are as near to each other as rounding explains, by how far they have come; the rest of the state is."""
    mine, theirs = plain.state_dict(), fast.state_dict()
    other = sorted(mine.keys() ^ theirs.keys())[:4]
    require(not other, f"on the engine the state has other names, {other}: {advice}")
    start, weights = plain.origin(), plain.weights()
    moved = {key: value.detach() - start[name] for key, value in weights.items() if (name := key.partition(".")[2]) in start}
    if moved:
        way = torch.stack([value.norm() for value in moved.values()]).norm()
        size = torch.stack([weights[key].norm() for key in moved]).norm()
        away = torch.stack([(mine[key] - theirs[key]).norm() for key in moved]).norm()
        near = bool(away <= 2e-3 * way + 1e-6 * size)
        require(near, f"on the engine weights are {float(away / way):.1%} of their way off: {advice}")
    for key, value in mine.items():
        fits = key in moved or within_rounding(value, theirs[key])
        require(fits, f"on the engine {key!r} of the state is another: {advice}")


def within_rounding(value: Tensor, other: Tensor) -> bool:
    """True for equal values, or numbers within rounding beside what is not finite and equal: some state begins so."""
    if value.shape != other.shape or not value.is_floating_point():
        return torch.equal(value, other)
    known = value.isfinite()
    numbers = value[known], other[known]
    near = bool((numbers[0] - numbers[1]).norm() <= 1e-2 * numbers[0].norm() + 1e-5)
    return near and alike(value[~known], other[~known])


def _smooth(adapter: Adapter) -> Adapter:
    for group in [] if adapter.optimizer is None else adapter.optimizer.param_groups:
        if "eps" in group:
            group["eps"] = max(group["eps"], SMOOTH)
    return adapter


def _redirect(adapter: Adapter, change: Callable[[Tensor, Any], tuple[Tensor, Any]]) -> None:
    """Let the descent be given another loss, or another word on whether there is something to learn."""
    descent: Any = adapter.descent
    gradient: Callable[..., Tensor] = descent.gradient

    def changed(loss: Tensor, penalties: Any = (), when: Any = True) -> Tensor:
        loss, when = change(loss, when)
        return gradient(loss, penalties, when)

    assert isinstance(descent, Descent)
    descent.gradient = changed  # type: ignore[method-assign]
