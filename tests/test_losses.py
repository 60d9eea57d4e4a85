"""Losses and weights of samples against sums written out."""

import math

import numpy as np
import torch
from torch import Tensor

from petal import losses


def logits(n: int = 6, c: int = 4, scale: float = 3.0) -> Tensor:
    return torch.randn(n, c, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale


def softmax(z: Tensor) -> np.ndarray:
    e = np.exp(z.numpy())
    return e / e.sum(1, keepdims=True)


def test_soft_likelihood_ratio() -> None:
    z = logits()
    q = np.minimum(softmax(z), 0.9)
    expected = -(q * np.log(q / (1 - q) + 1e-3)).sum(1)
    assert np.allclose(losses.soft_likelihood_ratio(z, clip=0.9, eps=1e-3), expected)
    sure = torch.tensor([[30.0, 0.0]], requires_grad=True)
    losses.soft_likelihood_ratio(sure).sum().backward()
    assert sure.grad.abs().max() < 1e-9             # clipped: none


def test_weights_by_certainty_and_diversity() -> None:
    z, mean = logits(), torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    p = softmax(z)
    far = np.array([1 - row @ mean.numpy() / np.linalg.norm(row) / np.linalg.norm(mean) for row in p])
    far = (far - far.min()) / (far.max() - far.min())
    sure = (p * np.log(p)).sum(1)
    sure = (sure - sure.min()) / (sure.max() - sure.min())
    weights, counts = losses.certain_and_diverse(z, mean, 0.5)
    assert counts.tolist() == (far >= far.mean()).tolist()
    assert 0 < counts.sum() < 6
    assert np.allclose(weights, np.where(far >= far.mean(), np.exp(far * sure / 0.5), 0))


def test_alike_samples_all_count_the_same() -> None:
    for n in (1, 3):
        weights, counts = losses.certain_and_diverse(logits(1).expand(n, -1), torch.full((4,), 0.25).double(), 0.5)
        assert weights.tolist() == [1.0] * n
        assert counts.all()


def test_smoothed_prior() -> None:
    for n in (2, 9):                                # fewer samples than classes, and more
        z = logits(n)
        prior = softmax(z).mean(0)
        smooth = max(1 / n, 1 / 4) / prior.max()
        assert np.allclose(losses.smoothed_prior(z), (prior + smooth) / (1 + 4 * smooth))


def test_contrastive_loss_written_out() -> None:
    views = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = [(v, n, (views[v, n] / views[v, n].norm()).numpy()) for v in range(3) for n in range(5)]
    total = 0.0
    for v, n, anchor in z:
        others = [(w, m, math.exp(anchor @ other / 0.2)) for w, m, other in z if (w, m) != (v, n)]
        below = sum(e for *_, e in others)
        total -= np.mean([math.log(e / below) for _, m, e in others if m == n])
    assert abs(losses.contrastive(views, 0.2).item() - total / 15) < 1e-12


def test_the_nearest_prototype_is_one_that_is_there() -> None:
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0], [0.0, 0.0]])
    features = torch.tensor([[5.0, 1.0], [0.1, 0.9], [-3.0, -1.0]])
    there = torch.tensor([True, True, True, False])
    assert torch.equal(losses.nearest(features, prototypes, there), prototypes[[0, 1, 2]])
    only = torch.tensor([False, True, False, False])        # all others have a higher cosine to one of the features
    assert torch.equal(losses.nearest(features, prototypes, only), prototypes[[1, 1, 1]])
