"""A state that was loaded stays the caller's: it can be loaded again later."""

import pytest
import torch

import petal
from methods.made import ENGINES, make, run, same


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
