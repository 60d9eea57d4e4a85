"""ROID against runs of the collection's code, and the choices that it leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import petal
from methods.field import CASES, close, flat, golden_run, inputs
from methods.golden import augment, read, sgd
from petal.errors import ConfigError
from petal.methods.roid import VIEWS


@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_roid_is_the_reference(norm: str, optimizer: str) -> None:
    adapter, golden, logits = golden_run("roid", petal.ROID, norm, optimizer)
    assert close(logits, golden["logits"])
    assert close(flat(adapter.adapted), golden["weights"])
    assert close(adapter.mean, golden["mean"])
    quick, _, rough = golden_run("roid", petal.ROID, norm, optimizer, dtype=torch.float32)
    assert quick.executor is not None
    assert close(rough, golden["logits"], 1e-3)
    assert close(flat(quick.adapted), golden["weights"], 1e-3)


def test_roid_without_weighting_view_and_prior_is_the_reference() -> None:
    golden, settings = read("roid_plain")
    model, batches = inputs()
    adapter = petal.ROID(model, optimizer=sgd, **settings)
    assert close(torch.cat([adapter(x) for x in batches]), golden["logits"])
    assert close(flat(adapter.adapted), golden["weights"])


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_the_three_answers() -> None:
    model, (x, *_) = inputs()
    answers = {kind: petal.ROID(model, answer=kind, augment=augment)(x).numpy() for kind in ("own", "calibrated", "logits")}
    p = softmax(answers["logits"])
    prior = p.mean(0)
    smooth = max(1 / 16, 1 / 10) / prior.max()
    prior = (prior + smooth) / (1 + 10 * smooth)
    assert np.allclose(answers["own"], answers["logits"] * prior, atol=1e-12)
    assert np.allclose(np.exp(answers["calibrated"]), p * prior / (p * prior).sum(1, keepdims=True), atol=1e-12)
    assert np.allclose(answers["logits"], petal.BatchNorm(model)(x).numpy(), atol=1e-12)
    assert np.allclose(petal.ROID(model, augment=augment).predict(x).numpy(), answers["own"], atol=1e-12)


def test_the_whole_batch_differs_by_its_statistics_alone() -> None:
    def weights(norm: str, augmented: str) -> torch.Tensor:
        model, batches = inputs(norm)
        adapter = petal.ROID(model, 0.02, augmented=augmented, augment=augment, optimizer=sgd)
        for x in batches:
            adapter(x)
        return flat(adapter.adapted)

    assert close(weights("group", "all"), weights("group", "kept"), 1e-12)
    assert not close(weights("batch", "all"), weights("batch", "kept"), 1e-6)
    seen: list[int] = []
    model, (x, *_) = inputs()
    petal.ROID(model, augment=lambda x: seen.append(len(x)) or augment(x))(x)
    petal.ROID(model, augment=lambda x: seen.append(len(x)) or augment(x), augmented="all")(x)
    assert 0 < seen[0] < 16 == seen[1]


def test_unweighted_consistency_counts_every_image() -> None:
    model, (x, *_) = inputs()
    adapter = petal.ROID(model, 1.0, share=0, weighting=False, augment=augment, optimizer=torch.optim.SGD)
    before = {name: value.detach().clone().requires_grad_() for name, value in adapter.adapted.items()}
    p, q = (torch.func.functional_call(adapter.model, before, (images,)).softmax(1) for images in (x, augment(x)))
    clipped = p.clamp(max=0.99)
    loss = -(clipped * (clipped / (1 - clipped) + 1e-5).log()).sum() - 0.5 * (p * q.log() + q * p.log()).sum()
    gradients = torch.autograd.grad(loss / 16, list(before.values()))
    adapter(x)
    for value, old, gradient in zip(adapter.adapted.values(), before.values(), gradients, strict=True):
        assert close(value, old - gradient, 1e-10)


@pytest.mark.filterwarnings("ignore:a batch of one sample:petal.PetalWarning")
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images_that_are_all_alike_weigh_the_same(norm: str) -> None:
    model, (x, *_) = inputs(norm)
    for batch in (x[:1], x[:1].expand(4, -1, -1, -1).clone()):
        adapter = petal.ROID(model, augment=augment)
        answer, start = adapter(batch), flat(adapter.origin())
        assert answer.isfinite().all()
        assert adapter.skipped == 0
        assert not close(flat(adapter.adapted), start, 1e-6)


def test_the_views_are_without_blur_and_noise() -> None:
    x = torch.rand(4, 3, 16, 16)
    assert torch.equal(VIEWS.blur_weights(torch.rand(2, 16)), torch.tensor([0.0, 0, 1, 0, 0]).expand(2, 5))
    still = replace(VIEWS, brightness=(1, 1), contrast=(1, 1), saturation=(1, 1), hue=(0, 0), gamma=(1, 1), degrees=(0, 0),
                    translate=0, scale=(1, 1), flip=0)  # fmt: skip
    assert torch.allclose(still(x), x, atol=1e-5)


@pytest.mark.parametrize(("options", "words"), [
    ({"share": 1.5}, "share must be"), ({"temperature": 0}, "temperature must be"), ({"momentum": -0.1}, "momentum must be"),
    ({"answer": "best"}, "answer must be one of 'own', 'calibrated', 'logits'"), ({"batch_size": 0}, "batch_size must be"),
    ({"augmented": "some"}, "augmented must be one of 'kept', 'all'"),
])  # fmt: skip
def test_settings_that_make_no_sense(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        petal.ROID(inputs()[0], **options)
