"""Checks of what an adapter keeps: the same seed, reset, state dicts, checkpoints, and state that nobody declared."""

import pickle
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from petal.checkpoint import load, save
from petal.checks.attributes import Leaf, attributes, read_first
from petal.checks.suite import CheckFailed, Subject, check, layers, require, same_answers, same_state
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
    fresh = adapter.state_dict()
    first = subject.run(adapter, 0, subject.some)
    then, held = adapter.state_dict(), attributes(adapter)
    adapter.reset()
    advice = "leave it to the base class, and declare what changes by register_state"
    same_state(fresh, adapter.state_dict(), f"reset does not bring back the beginning: {advice}")
    again = subject.run(adapter, 0, subject.some)
    left = [path for path, leaf in attributes(adapter).items() if leaf.differs(held.get(path))]
    require(not left, f"reset leaves {', '.join(left[:4])} as it is: {remedy(left, attributes(adapter))}")
    same_answers(first, again, f"after reset the same batches get other answers: {advice}")
    same_state(then, adapter.state_dict(), f"after reset the same batches lead to another state: {advice}")


@check("state")
def round_trip(subject: Subject) -> None:
    """The state from the middle of a stream, put into another adapter, goes on to the bit."""
    adapter, other = subject.new(), subject.new(seed=99)
    subject.run(adapter, 0, subject.some)
    state = adapter.state_dict()
    for key, value in state.items():
        require(isinstance(value, Tensor), f"the state holds {type(value).__name__} as {key!r}: it is a flat dict of tensors")
    pickle.dumps(state)
    expected = subject.run(adapter, 30, subject.some)
    subject.run(other, 70, 2)
    other.load_state_dict(state)
    _goes_on(subject, adapter, other, expected, "the state")
    same_state(state, _loaded(subject, state).state_dict(), "a state that was loaded is given back as another")


@check("checkpoint")
def checkpoint(subject: Subject) -> None:
    """`petal.save` and `petal.load` in the middle of a stream, in another adapter: it goes on to the bit."""
    adapter, other = subject.new(), subject.new(seed=99)
    subject.run(adapter, 0, subject.some)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save(adapter, path, {"position": 7})
        expected = subject.run(adapter, 30, subject.some)
        extra = load(other, path)
    require(extra == {"position": 7}, f"a checkpoint gives back {extra} for what was saved with it")
    _goes_on(subject, adapter, other, expected, "a checkpoint")


@check("no undeclared state")
def no_undeclared_state(subject: Subject) -> None:
    """Every tensor and number that changes in a step and that later steps depend on is in the state."""
    adapter = subject.new()
    subject.run(adapter, 0, subject.some)
    held = attributes(adapter)
    twin = _loaded(subject, adapter.state_dict())
    suspects = _forgotten(held, attributes(twin))
    if not suspects:
        return
    number, state = 30, adapter.state_dict()
    read: set[str] = set()
    for depth, layer in enumerate(layers(adapter)):
        names = {held[path].attribute for path in suspects if held[path].owner is layer}
        if names:
            another = _loaded(subject, state)
            read |= read_first(layers(another)[depth], names, partial(subject.answer, another, number))
    subject.answer(adapter, number), subject.answer(twin, number)
    now, then = attributes(adapter), attributes(twin)
    found = [
        path
        for path in suspects
        if path not in now
        or now[path].differs(then.get(path))
        or (held[path].attribute in read and now[path].differs(held[path]))
    ]
    require(not found, f"{', '.join(f'`{path}`' for path in found[:6])} changes while adapting and is not in the state, so that "
            f"checkpoints and reset lose it: {remedy(found, held)}")  # fmt: skip


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


def remedy(paths: list[str], held: dict[str, Leaf]) -> str:
    """What to do about values that should be in the state."""
    advice: list[str] = []
    for path in paths:
        leaf, name = held.get(path), path.split(".")[0].split("[")[0]
        if leaf is not None and leaf.kind == "parameter":
            advice.append(f"name parameters that learn in adapt(), and networks that follow in register_network({name!r}, ...)")
        elif leaf is not None and leaf.kind == "buffer" and leaf.attribute in leaf.owner._modules:
            advice.append(f"declare the statistics of a network by register_statistics({leaf.attribute!r})")
        else:
            advice.append(
                f"declare it in the constructor as a tensor, self.register_state({(leaf.attribute if leaf else name)!r}, value)"
            )
    return "; ".join(dict.fromkeys(advice[:4]))


def _goes_on(subject: Subject, adapter: Adapter, other: Adapter, expected: list[Tensor], what: str) -> None:
    """The other adapter, which has been put to the adapter's state, gives the same answers as it did."""
    got = subject.run(other, 30, len(expected))
    mine, theirs = attributes(adapter), attributes(other)
    lost = _forgotten(mine, theirs)
    hint = f"; {', '.join(lost[:4])} came to differ: {remedy(lost, mine)}" if lost else ""
    same_answers(expected, got, f"{what} does not go on as the adapter did{hint}")
    same_state(adapter.state_dict(), other.state_dict(), f"{what} leads to another state than the adapter's own{hint}")


def _loaded(subject: Subject, state: dict[str, Tensor]) -> Adapter:
    fresh = subject.new()
    fresh.load_state_dict(state)
    return fresh


def _forgotten(held: dict[str, Leaf], loaded: dict[str, Leaf]) -> list[str]:
    """What was held and is not there, or another, in an adapter that has the state."""
    return [path for path, leaf in held.items() if leaf.differs(loaded.get(path))]
