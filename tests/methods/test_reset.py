"""`reset` gives the state after construction, also the part of it that no checkpoint holds."""

import pytest
import torch

import petal
from methods.made import ENGINES, make, run, same


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", petal.METHODS)
def test_reset_leaves_nothing_of_what_was(kind: str, engine: str) -> None:
    adapter, fresh = make(kind, engine), make(kind, engine)
    run(adapter, 0, 1)
    teacher = kind in ("cotta", "petal")
    assert adapter.views_used is teacher
    assert (float(adapter.restored) > 0) is teacher
    adapter.skipped += 1
    adapter.reset()
    assert same(adapter.state_dict(), fresh.state_dict())
    assert (adapter.views_used, float(adapter.restored), adapter.skipped) == (False, 0.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(run(adapter, 2, 3), run(fresh, 2, 3), strict=True))
