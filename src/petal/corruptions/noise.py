"""Noise: every value of an image by itself."""

from functools import lru_cache

import torch
from torch import Tensor

from petal.corruptions.random import KeyedRandom

__all__ = ["gaussian_noise", "impulse_noise", "poisson", "shot_noise", "speckle_noise"]

_RATE_STEPS = 255  # grid rates from 0 to the largest


def gaussian_noise(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """x + N(0, c)."""
    return rng.normal(x.shape[1:]).mul_(c).add_(x)


def speckle_noise(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """x + x N(0, c)."""
    return rng.normal(x.shape[1:]).mul_(c).add_(1.0).mul_(x)


def shot_noise(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """Poisson(x c) / c."""
    return poisson(x, c, rng).div_(c)


def impulse_noise(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """Salt and pepper: a share c of all values, half of them 1 and half 0."""
    u = rng.uniform(x.shape[1:])
    return torch.where(u < c, (u < 0.5 * c).to(x.dtype), x)


def poisson(x: Tensor, peak: float, rng: KeyedRandom) -> Tensor:
    """Poisson counts of rate x * peak, x in [0, 1], as float32.

    The rate is split into the grid rate below it and a small remainder, and the sum of two independent Poisson counts is
    Poisson again. The first is found in one table of all distribution functions laid end to end in 32-bit fixed point, by
    one binary search; the second, whose rate is below peak / 255, by summing its distribution.
    """
    table, width = _poisson_table(float(peak), x.device)
    position = (x * _RATE_STEPS).clamp_(0, _RATE_STEPS)
    row = position.long()
    uniform = rng.bits(x.shape[1:]).long().bitwise_and_(0xFFFFFFFF)
    count = torch.searchsorted(table, uniform.add_(row << 32), right=True).sub_(row * width)

    rate = position.sub_(row).mul_(peak / _RATE_STEPS)
    u = rng.uniform(x.shape[1:])
    probability = torch.exp(-rate)
    u.sub_(probability)
    total = count.float().add_(u >= 0)
    for k in range(1, _remainder_terms(peak / _RATE_STEPS)):
        probability.mul_(rate).div_(k)
        total.add_(u.sub_(probability) >= 0)
    return total


def _remainder_terms(rate: float) -> int:
    """How many terms leave less than 2^-25 of a Poisson distribution of this rate out."""
    term, terms = 1.0, 0
    while term > 2.0**-25:
        terms += 1
        term *= rate / terms
    return terms + 1


@lru_cache(maxsize=16)
def _poisson_table(peak: float, device: torch.device) -> tuple[Tensor, int]:
    """The distribution functions of all grid rates: row r, place n holds (r + P(count <= n)) * 2^32; and the row's width."""
    width = int(peak + 7.5 * peak**0.5 + 20)
    rate = torch.arange(_RATE_STEPS + 1, dtype=torch.float64)[:, None] * (peak / _RATE_STEPS)
    n = torch.arange(width, dtype=torch.float64)
    log_mass = torch.xlogy(n, rate) - rate - torch.lgamma(n + 1)
    cdf = log_mass.exp().cumsum(dim=1).clamp_(max=1.0)
    cdf[:, -1] = 1.0
    rows = torch.arange(_RATE_STEPS + 1)[:, None] << 32
    fixed = (cdf * 2.0**32).round().long()  # to the nearest: both tails end where less than 2^-33 is left
    return (fixed + rows).flatten().to(device), width
