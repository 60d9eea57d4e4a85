from pathlib import Path

import pytest

from petal import ConfigError
from petal.runs import Trial, tune
from runs.parts import known, opened


def test_alpha_then_delta_on_validation_corruptions_only(source: Path) -> None:
    o = opened(source)
    row = known()["petal"]
    seen: list[tuple[int, int, Trial]] = []
    trials = tune(o, row, alphas=[1e-6, 1e-9], deltas=[0.03, 0.5], progress=lambda *p: seen.append(p))
    assert [(n, total) for n, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    tried = [(t.prior_weight, t.quantile) for _, _, t in seen]
    best = min((t for _, _, t in seen[:2]), key=lambda t: (t.error, t.brier)).prior_weight
    assert tried == [(1e-6, 0.03), (1e-9, 0.03), (best, 0.5)]
    assert [t.error for t in trials] == sorted(t.error for t in trials)
    for wrong in (["fog"], ["spatter", "snow"], []):
        with pytest.raises(ConfigError, match="never on the test"):
            tune(o, row, corruptions=wrong)
