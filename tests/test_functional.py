"""The pure maths against NumPy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petal import functional as F

RNG = np.random.default_rng


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def pair(scale: float = 3.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return RNG(seed).normal(0, scale, (7, 5)), RNG(seed + 1).normal(0, scale, (7, 5))


def test_losses() -> None:
    a, b = pair()
    student, teacher = softmax(a), softmax(b)
    ta, tb = torch.tensor(a), torch.tensor(b)
    forward = -(teacher * np.log(student)).sum(1)
    backward = -(student * np.log(teacher)).sum(1)
    np.testing.assert_allclose(F.cross_entropy(ta, tb), forward, rtol=1e-12)
    np.testing.assert_allclose(F.symmetric_cross_entropy(ta, tb), (forward + backward) / 2, rtol=1e-12)
    np.testing.assert_allclose(F.entropy(ta), -(student * np.log(student)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(F.confidence(ta), student.max(1), rtol=1e-12)
    labels = np.array([0, 1, 2, 3, 4, 0, 1])
    np.testing.assert_allclose(F.nll(ta, torch.tensor(labels)), -np.log(student[np.arange(7), labels]), rtol=1e-12)
    np.testing.assert_allclose(
        F.brier(ta, torch.tensor(labels)), ((student - np.eye(5)[labels]) ** 2).sum(1), rtol=1e-12
    )


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_losses_stay_finite_for_huge_logits(scale: float) -> None:
    a, b = (torch.tensor(v * scale, dtype=torch.float32) for v in pair(1.0))
    for values in (F.entropy(a), F.confidence(a), F.cross_entropy(a, b), F.brier(a, torch.zeros(7, dtype=torch.long))):
        assert values.isfinite().all()
    assert (F.entropy(a) >= 0).all()


def test_gradient_of_the_losses_is_the_known_one() -> None:
    """d/dlogits of H(y', y) is y - y', per sample; the target gets none where it is constant."""
    a, b = pair()
    logits = torch.tensor(a, requires_grad=True)
    F.cross_entropy(logits, torch.tensor(b)).sum().backward()
    np.testing.assert_allclose(logits.grad, softmax(a) - softmax(b), atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ema(decay: float, dtype: torch.dtype) -> None:
    old = [RNG(i).normal(size=shape) for i, shape in enumerate([(3,), (2, 4), ()])]
    new = [RNG(i + 9).normal(size=v.shape) for i, v in enumerate(old)]
    average, values = [torch.tensor(v, dtype=dtype) for v in old], [torch.tensor(v, dtype=dtype) for v in new]
    kept = [v.clone() for v in values]
    F.ema_(average, values, decay)
    for got, a, b in zip(average, old, new, strict=True):
        np.testing.assert_allclose(got, decay * a + (1 - decay) * b, rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)
    assert all(torch.equal(v, k) for v, k in zip(values, kept, strict=True))
    if decay == 0:
        assert all(torch.equal(a, v) for a, v in zip(average, values, strict=True))


# ---------------------------------------------------------------- quantile

SELECTIONS: dict[str, Callable[[Tensor, int, int], tuple[Tensor, Tensor]]] = {
    "cpu": F._select_cpu,
    "topk": F._select_topk,
}
numbers = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 1e-30, 7.0]), st.floats(-1e6, 1e6, width=32))


@settings(max_examples=150, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.03]), st.floats(0, 1)))
def test_quantile_equals_numpy(values: list[float], q: float) -> None:
    whole = np.array(values)
    expected = np.quantile(whole, q)
    flat = torch.tensor(values, dtype=torch.float64)
    np.testing.assert_allclose(F.quantile_(flat, q).item(), expected, rtol=1e-9, atol=1e-9)
    assert sorted(flat.tolist()) == sorted(values), "quantile_ may change the order, not the values"
    single = F.quantile_(torch.tensor(values, dtype=torch.float32), q)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.item(), expected, rtol=1e-5, atol=1e-6 * (1 + np.ptp(whole)))


@settings(max_examples=150, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.data())
def test_both_selections_give_the_exact_order_statistics(values: list[float], data: st.DataObject) -> None:
    lower = data.draw(st.integers(0, len(values) - 1))
    upper = min(lower + data.draw(st.integers(0, 1)), len(values) - 1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.tensor(values, dtype=dtype)
        expected = sorted(flat.tolist())
        for name, select in SELECTIONS.items():
            got = select(flat.clone(), lower, upper)
            assert [v.item() for v in got] == [expected[lower], expected[upper]], (name, dtype)
            assert all(v.dtype == dtype for v in got)


@pytest.mark.parametrize("q", [0.0, 0.001, 0.03, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("select", SELECTIONS)
def test_quantile_of_a_network_sized_vector(q: float, select: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "_select_cpu", SELECTIONS[select])
    values = RNG(0).normal(size=20_011) ** 2
    assert F.quantile_(torch.tensor(values), q).item() == pytest.approx(np.quantile(values, q), rel=1e-12)


def test_quantile_of_more_elements_than_torch_takes() -> None:
    count = 2**24 + 5
    flat = torch.arange(count, dtype=torch.float32).flip(0)  # float32 holds whole numbers up to 2**24
    with pytest.raises(RuntimeError):
        torch.quantile(flat, 0.03)
    assert F.quantile_(flat, 0.03).item() == pytest.approx(0.03 * (count - 1), abs=0.1)


def test_quantile_of_half_precision_is_in_half_precision() -> None:
    values = torch.tensor([4.0, 1.0, 3.0, 2.0], dtype=torch.bfloat16)
    middle = F.quantile_(values, 0.5)
    assert middle.dtype == torch.bfloat16
    assert middle.item() == 2.5


def test_quantile_beside_infinity() -> None:
    assert F.quantile_(torch.tensor([1.0, math.inf]), 0.0).item() == 1.0
    assert F.quantile_(torch.tensor([1.0, 2.0, math.inf]), 0.5).item() == 2.0
    assert F.quantile_(torch.tensor([1.0, 2.0, math.inf]), 0.75).item() == math.inf


@pytest.mark.parametrize("q", [-0.01, 1.01, math.nan])
def test_bad_quantile(q: float) -> None:
    with pytest.raises(ValueError, match=r"lies in \[0, 1\]"):
        F.quantile_(torch.ones(3), q)
    with pytest.raises(ValueError, match="no elements"):
        F.quantile_(torch.ones(0), 0.5)


# ---------------------------------------------------------------- restore and finiteness


def test_restore_puts_back_exactly_the_masked_weights() -> None:
    parameters = [torch.full((2, 3), 5.0), torch.full((4,), 5.0)]
    source = [torch.arange(6.0).view(2, 3), -torch.arange(4.0)]
    masks = [torch.tensor([[True, False, True], [False, False, True]]), torch.tensor([False] * 3 + [True])]
    ids = [p.data_ptr() for p in parameters]
    F.restore_(parameters, source, masks)
    assert parameters[0].tolist() == [[0, 5, 2], [5, 5, 5]]
    assert parameters[1].tolist() == [5, 5, 5, -3]
    assert ids == [p.data_ptr() for p in parameters]
    with pytest.raises(ValueError):
        F.restore_(parameters, source[:1], masks)


def test_restore_brings_a_broken_weight_back() -> None:
    """A where, not m * source + (1 - m) * weight, in which NaN times zero would stay."""
    parameter = torch.tensor([math.nan, math.inf, 1.0])
    F.restore_([parameter], [torch.zeros(3)], [torch.tensor([True, True, False])])
    assert parameter.tolist() == [0, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_finite(bad: float, dtype: torch.dtype) -> None:
    huge = torch.full((50,), torch.finfo(dtype).max, dtype=dtype)  # their sum and their squares overflow
    fine = [huge, -huge, torch.zeros((), dtype=dtype), torch.zeros(0, dtype=dtype)]
    assert F.all_finite(fine).item() is True
    for place in range(3):
        broken = [t.clone() for t in fine]
        broken[place].view(-1)[-1] = bad
        assert F.all_finite(broken).item() is False
    assert F.all_finite([torch.zeros(0)]).item() is True
    assert F.all_finite([]).item() is True


# ---------------------------------------------------------------- calibration


def loop_counts(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> np.ndarray:
    counts = np.zeros((3, bins))
    for row, label in zip(probabilities, labels, strict=True):
        for b in range(bins):
            if b / bins < row.max() <= (b + 1) / bins:
                counts[:, b] += 1, row.max(), row.argmax() == label
    return counts


@pytest.mark.parametrize("bins", [1, 2, 10, 15])
def test_calibration_counts(bins: int) -> None:
    logits, labels = RNG(0).normal(0, 2, (300, 4)), RNG(1).integers(0, 4, 300)
    counts = F.calibration_counts(torch.tensor(logits), torch.tensor(labels), bins)
    expected = loop_counts(softmax(logits), labels, bins)
    np.testing.assert_allclose(counts, expected, atol=1e-10)
    used = expected[0] > 0
    gaps = np.abs(expected[2, used] / expected[0, used] - expected[1, used] / expected[0, used])
    assert F.calibration_error(counts).item() == pytest.approx((gaps * expected[0, used] / 300).sum(), abs=1e-12)


def test_bins_are_closed_on_the_right() -> None:
    half = torch.zeros(1, 2, dtype=torch.float64)
    assert F.calibration_counts(half, torch.tensor([0]), 2)[0].tolist() == [1, 0]
    sure = torch.tensor([[1000.0, 0.0]])
    assert F.calibration_counts(sure, torch.tensor([1]), 15).tolist() == [[0] * 14 + [1], [0] * 14 + [1], [0] * 15]
    assert F.calibration_error(torch.zeros(3, 4)).item() == 0


def test_the_length_of_the_logits_takes_no_part_in_the_gradient_of_the_opinions_entropy() -> None:
    """By the definition with a uniform share of the classes, and by finite differences across the length."""
    a, _ = pair()
    logits = torch.tensor(a, requires_grad=True)
    value = F.opinion_entropy(logits)
    opinion = softmax(np.concatenate([a, np.full((7, 1), np.log(5))], 1)) + 1e-7
    np.testing.assert_allclose(value.detach(), -(opinion * np.log(opinion)).sum(1), rtol=1e-10)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    along = (gradient * logits.detach()).sum(1).abs()
    assert (along < 1e-10 * gradient.norm(dim=1) * logits.detach().norm(dim=1)).all()
    turned = torch.tensor(RNG(3).normal(0, 1, a.shape))
    direction = logits.detach() / logits.detach().norm(dim=1, keepdim=True)
    turned -= (turned * direction).sum(1, keepdim=True) * direction
    step = 1e-6 * turned
    with torch.no_grad():
        change = (F.opinion_entropy(logits + step) - F.opinion_entropy(logits - step)) / 2
    np.testing.assert_allclose((gradient * step).sum(1), change, rtol=1e-5, atol=1e-12)
