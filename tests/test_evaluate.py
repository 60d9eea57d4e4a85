"""Evaluation against scores computed in NumPy from the logits a second adapter gives."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from oracle import algorithm as oracle


def batch(seed: int, domain: str = "fog", severity: int = 5, n: int = 12, **more: object) -> SimpleNamespace:
    labels = torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(x=images(n, seed=seed), y=labels, domain=domain, severity=severity, **more)


STREAM = [
    batch(0, "fog", 5), batch(1, "fog", 5, n=7), batch(2, "snow", 5), batch(3, "snow", 3, n=9), batch(4, "fog", 5, n=5),
]  # fmt: skip


def scores(logits: list[Tensor], labels: list[Tensor]) -> dict[str, float]:
    probabilities = oracle.softmax(torch.cat(logits).double().numpy())
    y = torch.cat(labels).numpy()
    return {name: getattr(oracle, name)(probabilities, y) for name in ("error", "nll", "brier", "ece")} | {"n": len(y)}


def agree(got: petal.Scores, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("method", ["source", "tent", "petal"])
def test_scores(method: str) -> None:
    def make() -> petal.Adapter:
        model = network()
        if method == "petal":
            return petal.Petal(model, petal.DiagonalGaussian.isotropic(model, 0.1), views=3, confidence=0.95)
        return petal.METHODS[method](model)

    result = petal.evaluate(make(), STREAM)
    other = make()
    logits = [other(b.x) for b in STREAM]
    agree(result.mean, scores(logits, [b.y for b in STREAM]))
    assert list(result.by_domain) == ["fog", "snow"]
    for domain, places in (("fog", [0, 1, 4]), ("snow", [2, 3])):
        agree(result.by_domain[domain], scores([logits[i] for i in places], [STREAM[i].y for i in places]))
    assert len(result.records) == len(STREAM)
    for record, out, b in zip(result.records, logits, STREAM, strict=True):
        expected = scores([out], [b.y])
        assert (record.domain, record.severity, record.n) == (b.domain, b.severity, len(b.y))
        for name in ("error", "nll", "brier"):
            assert getattr(record, name) == pytest.approx(expected[name], abs=1e-9)
        p = oracle.softmax(out.double().numpy())
        assert record.confidence == pytest.approx(p.max(1).mean())
        assert record.entropy == pytest.approx(-(p * np.log(p)).sum(1).mean())
        assert np.shape(record.calibration) == (3, 15)
        assert sum(record.calibration[0]) == record.n
        assert record.seconds > 0
    assert [r.position for r in result.records] == list(range(5))
    if method == "petal":
        assert any(r.views_used for r in result.records)
        assert all(0 < r.restored < 0.1 for r in result.records)
        assert [r.views_used for r in result.records] == [bool(r.views_used) for r in result.records]


def test_records_are_plain_data_and_give_the_same_result() -> None:
    result = petal.evaluate(petal.Source(network()), STREAM)
    lines = [json.dumps(r.to_json()) for r in result.records]
    again = petal.summarize(petal.Record(**json.loads(line)) for line in lines)
    assert again.mean == result.mean
    assert again.by_domain == result.by_domain


def test_records_come_one_by_one() -> None:
    seen = 0

    def stream():
        nonlocal seen
        for b in STREAM:
            seen += 1
            yield b

    records = petal.iter_evaluate(petal.Source(network()), stream())
    for count in range(1, 6):
        next(records)
        assert seen == count


class Watched(petal.Source):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.events.append("call")
        return super().forward(x)

    def reset(self) -> None:
        self.events.append("reset")
        super().reset()


def test_resets_exactly_where_domain_or_severity_changes() -> None:
    adapter = Watched(network())
    petal.evaluate(adapter, STREAM, reset_on_domain_change=True)
    assert adapter.events == ["call", "call", "reset", "call", "reset", "call", "reset", "call"]
    adapter = Watched(network())
    petal.evaluate(adapter, STREAM)
    assert adapter.events == ["call"] * 5


def test_tent_online_is_a_fresh_tent_for_every_domain() -> None:
    result = petal.evaluate(petal.Tent(network(), lr=0.05), STREAM, reset_on_domain_change=True)
    logits = []
    for group in ([0, 1], [2], [3], [4]):
        fresh = petal.Tent(network(), lr=0.05)
        logits += [fresh(STREAM[i].x) for i in group]
    agree(result.mean, scores(logits, [b.y for b in STREAM]))
    lasting = petal.evaluate(petal.Tent(network(), lr=0.05), STREAM)
    assert lasting.mean.nll != pytest.approx(result.mean.nll, abs=1e-6)


def test_severity_may_be_missing_and_position_given() -> None:
    bare = SimpleNamespace(x=images(), y=batch(0).y, domain="d")
    (record,) = petal.iter_evaluate(petal.Source(network()), [bare])
    assert record.severity == 0
    (record,) = petal.iter_evaluate(petal.Source(network()), [batch(0, position=17)])
    assert record.position == 17


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_any_whole_number_is_a_label(dtype: torch.dtype) -> None:
    b = batch(0)
    expected = petal.evaluate(petal.Source(network()), [b]).mean
    b.y = b.y.to(dtype)
    assert petal.evaluate(petal.Source(network()), [b]).mean == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((12,), 5), "from 5 to 5.*predicts 5 classes"),
        (torch.full((12,), -1), "from -1 to -1"),
        (torch.zeros(11, dtype=torch.long), r"shape \[11\].*12 samples"),
        (torch.zeros(12, 1, dtype=torch.long), r"shape \[12, 1\]"),
        (torch.zeros(0, dtype=torch.long), r"shape \[0\]"),
        (torch.zeros(12), "torch.float32 labels"),
    ],
)
def test_bad_labels_are_named(labels: Tensor, message: str) -> None:
    bad = batch(0, "snow")
    bad.y = labels
    adapter, other = petal.Tent(network()), petal.Tent(network())
    with pytest.raises(petal.DataError, match=f"batch 1 of domain 'snow'.*{message}"):
        petal.evaluate(adapter, [batch(0), bad])
    if "predicts 5" in message:  # how many classes there are is known from the prediction alone
        return
    petal.evaluate(other, [batch(0)])
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in adapter.state_dict().items())


def test_no_batches() -> None:
    with pytest.raises(petal.DataError, match="no batches"):
        petal.evaluate(petal.Source(network()), [])


def test_a_skipped_update_is_counted_and_restores_nothing() -> None:
    model = network()
    q = petal.DiagonalGaussian.isotropic(model, 0.1)
    adapter = petal.Petal(model, q, views=2, confidence=2, restore=petal.Fisher(0.3))
    first = next(petal.iter_evaluate(adapter, [batch(0)]))
    assert first.restored > 0.2
    assert first.skipped == 0
    with torch.no_grad():
        adapter.model.fc.bias.fill_(math.inf)
    second = next(petal.iter_evaluate(adapter, [batch(1)]))
    assert second.skipped == 1
    assert second.restored == 0


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("confidence", [0.0, 2.0])
def test_predict(adapt: bool, confidence: float) -> None:
    def make() -> petal.Adapter:
        return petal.CoTTA(network(), views=3, confidence=confidence, lr=0.01)

    adapter, other = make(), make()
    for seed in range(3):
        before = adapter.state_dict()
        answer = petal.predict(adapter, images(seed=seed), adapt=adapt)
        logits = other(images(seed=seed)) if adapt else other.predict(images(seed=seed))
        p = oracle.softmax(logits.double().numpy())
        np.testing.assert_array_equal(answer.label, p.argmax(1))
        np.testing.assert_allclose(answer.probability, p.max(1), atol=1e-6)
        np.testing.assert_allclose(answer.probabilities, p, atol=1e-6)
        np.testing.assert_allclose(answer.entropy, -(p * np.log(p)).sum(1), atol=1e-5)
        assert answer.views_used is (confidence > 1)
        changed = any(not torch.equal(v, before[k]) for k, v in adapter.state_dict().items())
        assert changed == adapt
    assert answer[:4] == (answer.label, answer.probability, answer.entropy, answer.views_used)


def test_predict_adapts_by_default() -> None:
    adapter, explicit = petal.Tent(network()), petal.Tent(network())
    petal.predict(adapter, images())
    petal.predict(explicit, images(), adapt=True)
    assert all(torch.equal(v, explicit.state_dict()[k]) for k, v in adapter.state_dict().items())
    assert adapter.optimizer.state


def test_scores_of_huge_float32_logits_are_finite() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    result = petal.evaluate(petal.Source(model), STREAM)
    assert all(math.isfinite(v) for v in (result.mean.nll, result.mean.brier, result.mean.ece))
    assert 0 <= result.mean.brier <= 2


def test_labels_in_runs_are_warned_of_where_batch_statistics_meet_them() -> None:
    x = images(60)
    sorted_labels, mixed = torch.arange(60) // 12, torch.arange(60) % 5
    with pytest.warns(petal.PetalWarning, match=r"labels .* come in runs, and Guard\(Tent\) goes by"):
        petal.evaluate(petal.Guard(petal.Tent(network())), [(x, sorted_labels)] * 5)
    petal.evaluate(petal.Tent(network()), [(x, mixed)] * 5)             # a warning would be an error
    petal.evaluate(petal.Tent(network()), [(x, torch.zeros(60).long())] * 5)
    petal.evaluate(petal.Tent(network("group-norm")), [(x, sorted_labels)] * 5)
    petal.evaluate(petal.SmallBatch(petal.Tent(network())), [(x, sorted_labels)] * 5)
