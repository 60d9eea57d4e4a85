"""Tuning tries settings around the row's own, all on the same images."""

import json
from pathlib import Path

import pytest

from runs.command import FEW, call, of


def trials(source: Path, out: Path, *arguments: object) -> dict[tuple[float, float], tuple[float, ...]]:
    """Scores by (alpha, delta)."""
    call("tune", "digits", *FEW, *of(source), "--corruption", "speckle_noise", "--out", out, "-q", *arguments)
    found = json.loads(out.read_text())["trials"]
    return {(t["prior_weight"], t["quantile"]): (t["error"], t["nll"], t["brier"]) for t in found}


def test_the_seed_is_the_methods_and_not_that_of_the_noise(source: Path, tmp_path: Path) -> None:
    """Without views a method draws no random numbers, so nothing is left that a seed could change."""
    tried = ["--alpha", 1e-6, "--delta", 0.03]
    plain = [trials(source, tmp_path / "t.json", *tried, "--set", "petal.views=0", "--seed", seed) for seed in (0, 1)]
    assert plain[0] == plain[1]
    views = ["--set", "petal.views=2", "--set", "petal.confidence=2"]
    drawn = [trials(source, tmp_path / "t.json", *tried, *views, "--seed", seed) for seed in (0, 1)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(("own", "first"), [(["--set", "petal.restore=Fisher(0.1)"], 0.1), ([], 0.03)])
def test_alphas_are_tried_at_the_rows_own_delta(own: list[str], first: float, source: Path, tmp_path: Path) -> None:
    deltas = [word for delta in (0.03, 0.1) for word in ("--delta", delta)]
    tried = trials(source, tmp_path / "t.json", "--alpha", 1e-6, "--alpha", 1e-3, *deltas, "--set", "petal.views=0", *own)
    assert {alpha for alpha, delta in tried if delta == first} == {1e-6, 1e-3}
    ((best, _),) = [pair for pair in tried if pair[1] != first]
    assert best == min((1e-6, 1e-3), key=lambda alpha: (tried[alpha, first][0], tried[alpha, first][2]))
