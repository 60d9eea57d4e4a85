"""`petal bench steps`: which combinations are measured."""

import pytest
import torch

from petal.bench.steps import run


@pytest.mark.parametrize("gates", [["open"], ["closed"], ["open", "closed"]], ids=str)
def test_without_views_there_is_no_gate_to_open(gates: list[str]) -> None:
    """K 0 is measured once, whatever the gates: a number that was asked for is never left out."""
    once = {"count": 1, "warmup": 1, "parts": False}
    rows = list(run(["petal"], ["eager"], ["small"], [2], [0, 1], gates, torch.device("cpu"), **once))  # type: ignore[arg-type]
    assert [(row.views, row.gate) for row in rows] == [(0, "closed"), *((1, gate) for gate in gates)]
