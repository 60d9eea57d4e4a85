from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petal import Adapter, ConfigError, evaluate
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


def first_batches(source: Path, monkeypatch: pytest.MonkeyPatch, seed: int, **settings: object) -> tuple[Tensor, Adapter]:
    """The images and the adapter that a trial gets."""
    got: list[tuple[Tensor, Adapter]] = []

    def noting(adapter: Adapter, stream: Any) -> Any:
        got.append((next(iter(stream)).x, adapter))
        return evaluate(adapter, stream)

    monkeypatch.setattr("petal.runs.tuning.evaluate", noting)
    tune(opened(source, images=8, **settings), known()["petal"], alphas=[1e-9], deltas=[0.03], corruptions=["spatter"],
         seed=seed)  # fmt: skip
    return got[0]


def test_the_seed_is_the_methods_and_does_not_move_the_noise(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (x, one), (y, other) = (first_batches(source, monkeypatch, seed) for seed in (0, 7))
    assert torch.equal(x, y)
    assert (one.generator.initial_seed(), other.generator.initial_seed()) == (0, 7)
    z, _ = first_batches(source, monkeypatch, 0, stream_seed=7)
    assert not torch.equal(x, z)


def test_a_row_is_tuned_from_its_own_quantile(source: Path) -> None:
    row, first = known("petal.restore=Fisher(0.2)")["petal"], []
    trials = tune(opened(source, images=8), row, alphas=[1e-9], deltas=[0.03, 0.2], corruptions=["spatter"],
                  progress=lambda number, total, trial: first.append(trial.quantile))  # fmt: skip
    assert first == [0.2, 0.03]
    assert len(trials) == 2


def test_a_gradual_benchmark_is_tuned_at_the_highest_severity(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def noting(adapter: Adapter, stream: Any) -> Any:
        seen.extend((batch.domain, batch.severity) for batch in stream)
        return evaluate(adapter, stream)

    monkeypatch.setattr("petal.runs.tuning.evaluate", noting)
    o = opened(source, recipe="cifar10-gradual", images=8)
    tune(o, known()["petal"], alphas=[1e-9], deltas=[0.03], corruptions=["spatter"])
    assert seen == [("spatter", 5)]


def test_the_error_decides_and_the_brier_score_between_equals(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first."""
    scores = {1e-6: (0.2, 0.3), 1e-7: (0.1, 0.6), 1e-9: (0.1, 0.5), 1e-10: (0.3, 0.1)}

    def scored(adapter: Adapter, stream: Any) -> Any:
        error, brier = scores[adapter.prior_weight]
        return SimpleNamespace(mean=SimpleNamespace(error=error, nll=1.0, brier=brier, ece=0.1))

    monkeypatch.setattr("petal.runs.tuning.evaluate", scored)
    for alphas in (list(scores), list(reversed(scores))):
        trials = tune(opened(source, images=8), known()["petal"], alphas=alphas, deltas=[0.03], corruptions=["spatter"])
        assert [trial.prior_weight for trial in trials] == [1e-9, 1e-7, 1e-6, 1e-10]
