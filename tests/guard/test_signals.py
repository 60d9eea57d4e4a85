"""Every signal against NumPy."""

import math

import numpy as np
import pytest
import torch

import petal
from networks import images, network
from petal import Guard
from petal.guard.signals import Sums

from .scripted import CLASSES, batch, drive, make


def test_signals_against_numpy() -> None:
    guard = make(window=10**9)
    with torch.no_grad():
        guard.adapted["weight"][0, 0], guard.adapted["weight"][1, 1] = 0.0, 0.5
    x = [batch(seed) for seed in range(2)]
    for one in x:
        guard(one)
    weight = np.eye(CLASSES)
    weight[0, 0], weight[1, 1] = 0.0, 0.5

    def softmax(logits: np.ndarray) -> np.ndarray:
        e = np.exp(logits - logits.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    p = [softmax(one.numpy().astype(np.float64) @ weight.T) for one in x]
    mean = np.concatenate(p).mean(0)
    status = guard.status()
    assert status["concentration"] == pytest.approx(1 + (mean * np.log(mean)).sum() / np.log(CLASSES), rel=1e-5)
    assert status["entropy"] == pytest.approx(-(p[1] * np.log(p[1])).sum(1).mean(), rel=1e-5)  # it looks at the second
    assert status["confidence"] == pytest.approx(p[1].max(1).mean(), rel=1e-5)
    differ = p[1].argmax(1) != x[1].numpy().argmax(1)
    assert status["disagreement"] == pytest.approx(differ.mean())
    assert 0 < differ.mean() < 1
    assert status["distance"] == pytest.approx(math.sqrt(1 + 0.25) / math.sqrt(CLASSES), rel=1e-5)
    assert status["update"] == 0.0  # nothing moved since the first batch
    q = softmax(x[1].numpy().astype(np.float64))
    flatter = (q * np.log(q)).sum(1).mean() - (p[1] * np.log(p[1])).sum(1).mean()
    assert status["drift"] == pytest.approx(flatter / np.log(CLASSES), rel=1e-4)
    assert flatter > 0.05


@pytest.mark.parametrize(("length", "kept"), [(1000, 0.999**30), (50, 0.9)])
def test_how_fast_the_sums_fade(length: int, kept: float) -> None:
    """Comparisons by all samples since the last one, compared or not, but by no more than a tenth; the rest by its own."""
    sums = Sums()
    each, first = torch.eye(CLASSES).repeat(2, 1), 4 * torch.eye(CLASSES)[[0] * 10]         # 10 images
    for logits, source in ((each, each.roll(1, 0)), (first, first)):                # they agree on none, then on all
        sums.add(logits, length)
        sums.compare(logits, logits, source, length, every=3)
    here = sums.read(torch.zeros(2, dtype=torch.float64))
    assert here.disagreement == pytest.approx(kept / (1 + kept))
    sure = [math.exp(k) / (math.exp(k) + CLASSES - 1) for k in (1, 4)]
    assert here.confidence == pytest.approx((kept * sure[0] + sure[1]) / (kept + 1), rel=1e-6)
    seen = (1 - 1 / length) ** 10
    mean = np.full(CLASSES, seen / CLASSES + (1 - sure[1]) / (CLASSES - 1)) / (seen + 1)
    mean[0] = (seen / CLASSES + sure[1]) / (seen + 1)
    assert here.concentration == pytest.approx(1 + (mean * np.log(mean)).sum() / np.log(CLASSES), rel=1e-5)


def test_distance_is_in_standard_deviations_of_the_posterior() -> None:
    model = network()
    q = petal.DiagonalGaussian({k: p.detach() for k, p in model.named_parameters()},
                               {k: torch.full_like(p, 0.04) for k, p in model.named_parameters()}, damping=0.05)  # fmt: skip
    guard = Guard(petal.Petal(model, q, views=0), every=3)
    for seed in range(3):
        guard(images(seed=seed))
    squares = [((p.detach() - q.mean[k]) ** 2 / 0.09).flatten() for k, p in guard.model.named_parameters()]
    assert guard.status()["distance"] == pytest.approx(float(torch.cat(squares).mean().sqrt()), rel=1e-4)
    assert guard.status()["update"] == pytest.approx(guard.status()["distance"] / 3, rel=1e-4)


def test_frozen_batches_do_not_count_as_way() -> None:
    """The way is per batch that learned: a long rest before it must not make a fast one look slow."""
    guard = make(every=1, cooldown=4000)
    step = guard.method.drift = torch.full((CLASSES, CLASSES), 0.01)
    guard.freeze()
    drive(guard, 50)
    assert guard.status()["update"] == 0.0
    guard.thaw()
    drive(guard, 2, first=50)
    expected = float(step.norm()) / math.sqrt(CLASSES)
    assert guard.status()["update"] == pytest.approx(expected, rel=1e-5)
    assert guard.status()["distance"] == pytest.approx(2 * expected, rel=1e-5)


def test_the_way_starts_anew_at_a_rollback() -> None:
    guard = make(every=1)
    step = guard.method.drift = torch.full((CLASSES, CLASSES), 0.001)
    drive(guard, 15)
    assert any(key.startswith("guard.candidate.") for key in guard.state_dict())
    guard.rollback()
    assert torch.equal(guard.adapted["weight"].detach(), torch.eye(CLASSES))
    guard(batch(15))
    assert guard.status()["update"] == pytest.approx(float(step.norm()) / math.sqrt(CLASSES), rel=1e-4)


def test_usual_values_are_a_slow_average_of_healthy_looks() -> None:
    guard = make(every=1)
    guard.method.drift = torch.full((CLASSES, CLASSES), 0.001)
    usual = np.zeros(2)
    for seed in range(8):
        guard(batch(seed))
        here = np.array([guard.status()["distance"], guard.status()["update"]])
        usual = 0.9 * usual + 0.1 * here if seed else here
    np.testing.assert_allclose(guard.state_dict()["guard.usual"].numpy(), usual, rtol=1e-12)
