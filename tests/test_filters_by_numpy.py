"""Filters of samples against NumPy."""

import math

import numpy as np
import pytest
import torch

from petal.errors import ConfigError
from petal.filters import Redundancy, masked_mean, reliable
from petal.functional import entropy


def predictions(n: int = 9, c: int = 4, seed: int = 0) -> torch.Tensor:
    return (4 * torch.randn(n, c, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).softmax(1)


def test_reliable_is_below_a_share_of_the_largest_entropy() -> None:
    p = predictions()
    h = -(p.numpy() * np.log(p.numpy())).sum(1)
    keep = reliable(entropy(p.log()), 0.4, 4)
    assert keep.tolist() == (h < 0.4 * math.log(4)).tolist()
    assert 0 < keep.sum() < 9
    edge = torch.tensor([0.4 * math.log(4), math.nan, math.inf])
    assert reliable(edge, 0.4, 4).tolist() == [False, True, False]          # strictly below; NaN passes, to be counted


def test_the_mean_over_what_is_kept_has_gradients_there_only() -> None:
    values = torch.tensor([1.0, 5.0, math.inf], requires_grad=True)
    keep = torch.tensor([True, True, False])
    mean = masked_mean(values, keep)
    mean.backward()
    assert mean.item() == 3
    assert values.grad.tolist() == [0.5, 0.5, 0.0]
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0


def test_redundancy_over_batches() -> None:
    redundancy = Redundancy(similarity=0.6, momentum=0.7)
    mean: torch.Tensor | None = None
    known: np.ndarray | None = None
    for seed in range(6):
        p = predictions(seed=seed)
        q = p.numpy()
        reliable_ones = np.arange(9) % 3 < seed                             # none in the first batch
        cosine = np.zeros(9) if known is None else q @ known / np.linalg.norm(q, axis=1) / np.linalg.norm(known)
        wanted = reliable_ones & (np.abs(cosine) < 0.6)
        keep = redundancy.unlike(p, mean) & torch.tensor(reliable_ones)
        assert keep.tolist() == wanted.tolist()
        mean = redundancy.follow(p, mean, keep)
        if wanted.any():
            now = q[wanted].mean(0)
            known = now if known is None else 0.7 * known + 0.3 * now
        assert np.allclose(mean, np.zeros(4) if known is None else known, atol=1e-12)
    assert known is not None


def test_predictions_that_are_not_finite_do_not_enter_the_mean() -> None:
    redundancy, mean, p = Redundancy(0.9), predictions()[0], predictions()
    broken = p.clone()
    broken[0] = math.nan
    everything = torch.ones(9, dtype=torch.bool)
    assert torch.equal(redundancy.follow(broken, mean, everything), mean)
    assert not torch.equal(redundancy.follow(p, mean, everything), mean)


@pytest.mark.parametrize("options", [{"similarity": -0.1}, {"similarity": 2}, {"momentum": 1.5}])
def test_settings_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="lie in"):
        Redundancy(**options)
