"""A state that was loaded stays the caller's: it can be loaded again later."""

import pytest
import torch

import petal
from methods.made import ENGINES, make, run, same
from networks import CLASSES, network


def made(kind: str, engine: str) -> petal.Adapter:
    name, _, around = kind.partition("+")
    adapter = make(name, engine)
    if around == "guard":
        return petal.Guard(adapter, every=1, window=24)
    return petal.SmallBatch(adapter, memory=12, every=12) if around else adapter


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [*petal.METHODS, "petal+guard", "petal+small"])
def test_later_steps_do_not_change_a_state_that_was_loaded(kind: str, engine: str) -> None:
    first = made(kind, engine)
    run(first, 0, 1)
    state = first.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    answers = []
    for _ in range(2):
        adapter = made(kind, engine)
        adapter.load_state_dict(state)
        answers.append(run(adapter, 2, 3, 4))
        assert same(state, kept)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [*petal.METHODS, "petal+guard", "petal+small"])
def test_later_steps_do_not_change_a_state_that_was_taken(kind: str, engine: str) -> None:
    adapter = made(kind, engine)
    run(adapter, 0, 1)
    state = adapter.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    run(adapter, 2, 3)
    assert same(state, kept)


class Remembering(petal.Tent):
    """Keeps a mean and the last answer, which begins as None; both change in place."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.register_state("mean", torch.zeros(CLASSES))
        self.register_state("last", None)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().step(x)
        found = logits.detach().mean(0)
        self.mean.lerp_(found, 0.5)
        self.last = found if self.last is None else self.last.copy_(found)
        return logits


def test_declared_state_is_copied_wherever_it_goes() -> None:
    """Loaded, taken, and put back by a reset: what later steps change in place is never somebody else's."""
    adapter = Remembering(network())
    run(adapter, 0, 1)
    state = adapter.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    adapter.load_state_dict(state)
    run(adapter, 2)
    assert same(state, kept)
    for _ in range(2):
        adapter.reset()
        assert adapter.last is None
        assert not adapter.mean.any()
        run(adapter, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_without_the_optimizers_settings_is_refused_by_name(engine: str) -> None:
    adapter = make("tent", engine)
    run(adapter, 0)
    state = adapter.state_dict()
    lacking = {key: value for key, value in state.items() if key != "optimizer.group.0.lr"}
    with pytest.raises(petal.ConfigError, match=r"missing 'optimizer\.group\.0\.lr'"):
        adapter.load_state_dict(lacking)
    assert same(adapter.state_dict(), state)


@pytest.mark.parametrize("kind", ["petal+guard", "petal+small"])
def test_what_is_around_a_method_stays_if_the_method_refuses(kind: str) -> None:
    first, other = made(kind, "eager"), made(kind, "eager")
    run(first, 0, 1)
    run(other, 2, 3, 4)
    state = first.state_dict()
    state["model.fc.weight"] = state["model.fc.weight"][:1]
    before = other.state_dict()
    with pytest.raises(petal.ConfigError, match=r"'model\.fc\.weight' is"):
        other.load_state_dict(state)
    assert same(other.state_dict(), before)
