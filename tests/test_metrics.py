"""The metrics against the NumPy oracle and torchmetrics."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from oracle import algorithm as oracle
from petal.metrics import NLL, Brier, CalibrationError, Error

CLASSES = 6
METRICS = {"error": Error, "nll": NLL, "brier": Brier, "ece": CalibrationError}
ORACLES = {"error": oracle.error, "nll": oracle.nll, "brier": oracle.brier, "ece": oracle.ece}


def sample(n: int = 500, scale: float = 2.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    logits = rng.normal(0, scale, (n, CLASSES)) + 2 * np.eye(CLASSES)[labels]
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def expected(name: str, logits: Tensor, labels: Tensor) -> float:
    return ORACLES[name](oracle.softmax(logits.double().numpy()), labels.numpy())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_numpy(name: str, dtype: torch.dtype) -> None:
    logits, labels = sample(dtype=dtype)
    metric = METRICS[name]()
    metric.update(logits, labels)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    assert metric.compute().item() == pytest.approx(expected(name, logits, labels), rel=tolerance)


def test_equals_torchmetrics() -> None:
    logits, labels = sample(2000)
    theirs = {
        CalibrationError(): MulticlassCalibrationError(CLASSES, n_bins=15, norm="l1")(logits, labels),
        Error(): 1 - MulticlassAccuracy(CLASSES, average="micro")(logits, labels),
    }
    for metric, value in theirs.items():
        assert metric(logits, labels).item() == pytest.approx(value.item(), abs=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_batches_add_up_to_the_whole_and_reset_forgets(name: str) -> None:
    logits, labels = sample(101)
    metric = METRICS[name]()
    for part in torch.arange(101).split(17):  # the last one is smaller
        metric.update(logits[part], labels[part])
    whole = expected(name, logits, labels)
    assert metric.compute().item() == pytest.approx(whole, rel=1e-10)
    metric.reset()
    other = sample(40, seed=5)
    metric.update(*other)
    assert metric.compute().item() == pytest.approx(expected(name, *other), rel=1e-10)
    assert metric.compute().item() != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", METRICS)
def test_calling_gives_the_batch_and_keeps_the_whole(name: str) -> None:
    first, second = sample(30, seed=1), sample(50, seed=2)
    metric = METRICS[name]()
    assert metric(*first).item() == pytest.approx(expected(name, *first), rel=1e-10)
    assert metric(*second).item() == pytest.approx(expected(name, *second), rel=1e-10)
    both = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    assert metric.compute().item() == pytest.approx(expected(name, *both), rel=1e-10)


def test_certain_predictions() -> None:
    """A confidence of exactly 1 counts in the last bin, right or wrong, among those just below."""
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0], [0.0, 200.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    sure = 1 / (1 + np.exp(-3.0))
    ece = CalibrationError()
    assert ece(logits, labels).item() == pytest.approx(abs(3 + sure - 3) / 4, abs=1e-6)
    assert ece(logits[:2], labels[:2]).item() == 0.5
    assert Brier()(logits[:3], labels[:3]).item() == pytest.approx(2 / 3)
    assert NLL()(logits[:2], labels[:2]).item() == pytest.approx(100)
    assert Error()(logits, labels).item() == 0.25


@pytest.mark.parametrize("metric", [kind() for kind in METRICS.values()])
def test_large_float32_logits(metric: Metric) -> None:
    logits, labels = sample(scale=1e4, dtype=torch.float32)
    value = metric(logits, labels)
    assert value.isfinite()
    assert value.dtype == torch.float64
    probabilities = oracle.softmax(logits.double().numpy())
    if isinstance(metric, NLL):
        exact = -oracle.log_softmax(logits.double().numpy())[np.arange(500), labels.numpy()].mean()
    else:
        name = next(n for n, kind in METRICS.items() if isinstance(metric, kind))
        exact = ORACLES[name](probabilities, labels.numpy())
    assert value.item() == pytest.approx(exact, rel=1e-5)


def test_long_sums_keep_their_digits() -> None:
    """A float32 sum of this many batches would be off by a thousandth."""
    metric = NLL()
    logits, labels = torch.zeros(4096, 3), torch.zeros(4096, dtype=torch.long)
    for _ in range(2000):
        metric.update(logits, labels)
    assert metric.compute().item() == pytest.approx(np.log(3), rel=1e-7)


def test_bins_are_an_option() -> None:
    logits, labels = sample()
    values = {bins: CalibrationError(bins)(logits, labels).item() for bins in (1, 5, 15)}
    probabilities = oracle.softmax(logits.numpy())
    assert values == {b: pytest.approx(oracle.ece(probabilities, labels.numpy(), bins=b)) for b in values}
    assert len(set(values.values())) == 3
    with pytest.raises(ValueError, match="at least one bin"):
        CalibrationError(0)


@pytest.mark.parametrize("name", METRICS)
def test_parts_seen_by_several_processes_make_the_whole(name: str) -> None:
    """As torchmetrics brings the states of processes together, by the reduction that each state declares."""
    logits, labels = sample(90)
    parts = [METRICS[name]() for _ in range(3)]
    for metric, part in zip(parts, torch.arange(90).split([10, 30, 50]), strict=True):
        metric.update(logits[part], labels[part])
    whole = METRICS[name]()
    for state, reduce in whole._reductions.items():
        setattr(whole, state, reduce(torch.stack([getattr(part, state) for part in parts])))
    whole._update_count = 1
    assert whole.compute().item() == pytest.approx(expected(name, logits, labels), rel=1e-10)
