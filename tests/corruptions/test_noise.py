import numpy as np
import pytest
import torch
from scipy import stats

from petal.corruptions import corrupt, image_keys, noise
from petal.corruptions.random import KeyedRandom


def levels(value: float, n: int = 20) -> torch.Tensor:
    return torch.full((n, 3, 32, 32), value)


@pytest.mark.parametrize("peak", [3, 50, 500])
@pytest.mark.parametrize("value", [0.0, 1e-4, 0.0317, 100 / 255, 0.77777, 1.0])
def test_poisson_counts_have_the_poisson_distribution(peak: int, value: float) -> None:
    counts = noise.poisson(levels(value), peak, KeyedRandom(torch.arange(20))).numpy().ravel().astype(int)
    rate = float(np.float32(value)) * peak
    if rate == 0:
        assert not counts.any()
        return
    low, high = int(stats.poisson.ppf(1e-3, rate)), int(stats.poisson.ppf(1 - 1e-3, rate))
    seen = np.bincount(counts.clip(low, high) - low, minlength=high - low + 1)
    mass = stats.poisson.pmf(np.arange(low, high + 1), rate)
    mass[0], mass[-1] = stats.poisson.cdf(low, rate), stats.poisson.sf(high - 1, rate)
    if len(seen) > 1 and counts.size * mass.min() > 5:
        assert stats.chisquare(seen, mass / mass.sum() * counts.size).pvalue > 1e-4
    assert counts.mean() == pytest.approx(rate, abs=4.5 * np.sqrt(rate / counts.size))
    assert counts.var() == pytest.approx(rate, rel=0.05, abs=6 * np.sqrt(rate / counts.size))


def test_shot_noise_returns_multiples_of_one_photon() -> None:
    out = corrupt(levels(0.5), "shot_noise", 5, keys=torch.arange(20))
    assert torch.allclose(out * 50, (out * 50).round(), atol=1e-4)


def test_gaussian_and_speckle_noise_have_their_spread() -> None:
    keys = torch.arange(20)
    for value in (0.4, 0.5):
        plain = corrupt(levels(value), "gaussian_noise", 3, keys=keys) - value
        speckle = corrupt(levels(value), "speckle_noise", 3, keys=keys) - value
        assert stats.kstest(plain.numpy().ravel() / 0.08, "norm").pvalue > 1e-3
        assert stats.kstest(speckle.numpy().ravel() / (0.12 * value), "norm").pvalue > 1e-3


def test_impulse_noise_hits_its_share_of_values_half_white_half_black() -> None:
    out = corrupt(levels(0.5), "impulse_noise", 5, keys=image_keys(1, "impulse_noise", 5, range(20)))
    size = out.numel()
    white, black = (out == 1).sum().item(), (out == 0).sum().item()
    assert (out == 0.5).sum().item() == size - white - black
    for count in (white, black):
        assert count == pytest.approx(0.035 * size, abs=4.5 * np.sqrt(0.035 * size))
    hit = out != 0.5
    assert (hit[:, 0] & hit[:, 1]).float().mean().item() == pytest.approx(0.07**2, abs=0.002)  # each channel alone


@pytest.mark.parametrize("bits,unit", [(0, 0.0), (-1, 1 - 2**-24)])
def test_poisson_at_the_ends_of_the_uniform(bits: int, unit: float) -> None:
    class Ends(KeyedRandom):
        def bits(self, shape):
            return torch.full((1, *shape), bits, dtype=torch.int32)

        def uniform(self, shape, low=0.0, high=1.0):
            return torch.full((1, *shape), unit)

    x = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
    counts = noise.poisson(x, 50, Ends(torch.zeros(1, dtype=torch.int64))).numpy()
    rate = x.double().numpy() * 50
    assert counts[0, 0, 0, 0] == 0
    if bits == 0:
        assert (abs(counts - stats.poisson.ppf(2.0**-33, rate).clip(0)) <= 1).all()
    else:  # the tail of the grid rate, and that of the remainder, whose rate is below 0.2
        beyond = counts - stats.poisson.isf(2.0**-33, rate)
        assert ((beyond >= -1) & (beyond <= 7)).all()
