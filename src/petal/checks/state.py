"""Checks of what an adapter keeps: the same seed, reset, state dicts, checkpoints, and state that nobody declared."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from petal.checkpoint import load, save
from petal.checks.attributes import Leaf, attributes, watched
from petal.checks.suite import CheckFailed, Subject, check, require, same_answers, same_state
from petal.errors import ConfigError
from petal.methods import Adapter


@check("same seed")
def same_seed(subject: Subject) -> None:
    """Two adapters with one seed give the same answers and states, to the bit, whatever torch's own random numbers are."""
    first, second = subject.new(seed=3), subject.new(seed=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = [first(x) for x in subject.batches(0, subject.some)]
    used = "" if torch.equal(torch.get_rng_state(), before) else ", and torch's own random numbers were used"
    torch.manual_seed(2)
    got = [second(x) for x in subject.batches(0, subject.some)]
    advice = "draw random numbers from self.generator alone (generator=self.generator)"
    same_answers(expected, got, f"with the same seed answers are others{used}: {advice}")
    same_state(first.state_dict(), second.state_dict(), f"with the same seed states are others{used}: {advice}")


@check("reset")
def reset(subject: Subject) -> None:
    """After `reset` everything is as it began: weights, optimizer, counters, declared state, and so the answers."""
    adapter = subject.new()
    fresh, begun = adapter.state_dict(), attributes(adapter)
    first = subject.run(adapter, 0, subject.some)
    then, held = adapter.state_dict(), attributes(adapter)
    adapter.reset()
    advice = "leave it to the base class, and declare what changes by register_state"
    same_state(fresh, adapter.state_dict(), f"reset does not bring back the beginning: {advice}")
    left = forgotten(attributes(adapter), begun)
    again = subject.run(adapter, 0, subject.some)
    now = attributes(adapter)
    left = [path for path in left if path not in now or now[path].differs(held.get(path))]
    require(not left, f"reset does not put back {_listed(left)}: {remedy(left, held)}")
    same_answers(first, again, f"after reset the same batches get other answers: {advice}")
    same_state(then, adapter.state_dict(), f"after reset the same batches lead to another state: {advice}")


@check("state")
def round_trip(subject: Subject) -> None:
    """The state from the middle of a stream, put into another adapter, goes on to the bit."""
    adapter, other = subject.new(), subject.new(seed=99)
    subject.run(adapter, 0, subject.some)
    state, held = adapter.state_dict(), attributes(adapter)
    for key, value in state.items():
        require(isinstance(value, Tensor), f"{key!r} in the state is {type(value).__name__}: it is a flat dict of tensors")
    expected = subject.run(adapter, 30, subject.some)
    subject.run(other, 70, 2)
    other.load_state_dict(state)
    message = hint(held, other, "with the state of another adapter it does not go on as that one")
    goes_on(subject, adapter, other, expected, message)
    same_state(state, _loaded(subject, state).state_dict(), "a state that was loaded is given back as another")


@check("checkpoint")
def checkpoint(subject: Subject) -> None:
    """`petal.save` and `petal.load` in the middle of a stream, in another adapter: it goes on to the bit."""
    adapter, other = subject.new(), subject.new(seed=99)
    subject.run(adapter, 0, subject.some)
    held = attributes(adapter)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save(adapter, path, {"position": 7})
        expected = subject.run(adapter, 30, subject.some)
        extra = load(other, path)
    require(extra == {"position": 7}, f"a checkpoint gives back {extra} for what was saved with it")
    message = hint(held, other, "from a checkpoint it does not go on as the one that wrote it")
    goes_on(subject, adapter, other, expected, message)


@check("no undeclared state")
def no_undeclared_state(subject: Subject) -> None:
    """Every tensor and number that changes in a step and that later steps depend on is in the state."""
    adapter = subject.new()
    subject.run(adapter, 0, subject.some)
    held = attributes(adapter)
    twin = _loaded(subject, adapter.state_dict())
    suspects = forgotten(held, attributes(twin))
    if not suspects:
        return
    number = 30
    another = _loaded(subject, adapter.state_dict())
    read = _read_first(another, suspects, held, lambda: subject.answer(another, number))
    subject.answer(adapter, number), subject.answer(twin, number)
    now, then = attributes(adapter), attributes(twin)
    found = [
        path
        for path in suspects
        if path not in now
        or now[path].differs(then.get(path))
        or (path in read and now[path].differs(held[path]))
    ]
    verb = "change while adapting and are" if len(found) > 1 else "changes while adapting and is"
    lost = f"{_listed(found)} {verb} not in the state, so that checkpoints lose it"
    require(not found, f"{lost}: {remedy(found, held)}")


@check("foreign states", "plain")
def foreign_states(subject: Subject) -> None:
    """A state that does not fit is refused with the names of what is missing, unexpected or of another shape."""
    adapter = subject.new()
    subject.run(adapter, 0, 1)
    before = adapter.state_dict()
    changed: dict[str, dict[str, Tensor]] = {
        "missing": {key: value for key, value in before.items() if key != "generator"},
        "unexpected": before | {"model.nothing": torch.zeros(1)},
    }
    weights = [key for key in before if key.startswith("model.")]
    if weights:
        changed["instead of"] = before | {weights[0]: torch.zeros(99)}
    if adapter.optimizer is not None:
        changed["missing 'optimizer.group.0."] = {k: v for k, v in before.items() if not k.startswith("optimizer.")}
    for words, state in changed.items():
        try:
            adapter.load_state_dict(state)
        except ConfigError as error:
            require(words in str(error), f"the error for a state that does not fit does not say {words!r}: {error}")
        else:
            raise CheckFailed(f"a state with something {words} is loaded: leave load_state_dict to the base class")
        same_state(before, adapter.state_dict(), "a state that was refused has changed the adapter")


def remedy(paths: Sequence[str], held: Mapping[str, Leaf]) -> str:
    """What to do about values that should be in the state."""
    return "; ".join(dict.fromkeys(_advice(path, held[path]) for path in paths if path in held))


def _advice(path: str, leaf: Leaf) -> str:
    network = path.split(".")[0]
    if leaf.kind == "parameter":
        return f"name parameters that learn in adapt(), a network that follows them in register_network({network!r}, ...)"
    if leaf.kind == "buffer" and "." in path:
        return f"declare the statistics of a network by register_statistics({network!r})"
    if leaf.kind == "random":
        return "draw random numbers from self.generator, which is in the state"
    name = leaf.attribute if "." not in path else path.rpartition(".")[2].partition("[")[0]
    return f"keep it as a tensor that is declared in the constructor, self.register_state({name!r}, value)"


def forgotten(held: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> list[str]:
    """What is held, and is not there, or another, in another adapter."""
    return [path for path, leaf in held.items() if leaf.differs(other.get(path))]


def hint(held: Mapping[str, Leaf], loaded: Adapter, message: str) -> str:
    """The message, with what an adapter that has been put to a state does not have of what was held then."""
    lost = forgotten(held, attributes(loaded))
    return f"{message}; {_listed(lost)} did not come along: {remedy(lost, held)}" if lost else message


def goes_on(subject: Subject, adapter: Adapter, other: Adapter, expected: Sequence[Tensor], message: str) -> None:
    """Fail unless the other adapter now gives the answers that the adapter gave, and comes to its state."""
    same_answers(expected, subject.run(other, 30, len(expected)), message)
    same_state(adapter.state_dict(), other.state_dict(), message)


def _read_first(
    adapter: Adapter, paths: Sequence[str], held: Mapping[str, Leaf], call: Callable[[], object]
) -> set[str]:
    """Which values are read before they are written, while `call` runs; what is in a list or dict counts as read with it."""
    owners = {leaf.at: leaf.owner for leaf in attributes(adapter).values()}
    names: dict[str, set[str]] = {}
    for path in paths:
        names.setdefault(held[path].at, set()).add(held[path].attribute)
    with ExitStack() as stack:
        read = {at: stack.enter_context(watched(owners[at], wanted)) for at, wanted in names.items() if at in owners}
        call()
    return {path for path in paths if held[path].attribute in read.get(held[path].at, {held[path].attribute})}


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(f"`{path}`" for path in paths[:4]) + more


def _loaded(subject: Subject, state: dict[str, Tensor]) -> Adapter:
    fresh = subject.new()
    fresh.load_state_dict(state)
    return fresh
