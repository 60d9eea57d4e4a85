"""LAME against public code of the field, which returns probabilities."""

import numpy as np
import pytest
import torch
from torch import nn

import petal
from methods.golden import fast, read, small
from networks import images, network
from petal.errors import ConfigError, InputError


@pytest.mark.parametrize("name", ["lame_rbf", "lame_knn", "lame_linear"])
def test_lame_is_that_of_public_code(name: str) -> None:
    golden, settings = read(name)
    settings.pop("norm")
    model, batches = small()
    adapter = petal.LAME(model, **settings)
    before = adapter.state_dict()
    for x, expected in zip(batches, golden["probabilities"], strict=False):
        answer = adapter(x)
        assert (answer.exp() - expected).abs().max() < 1e-12
        assert (answer.softmax(1) - expected).abs().max() < 1e-12
        assert (petal.LAME(model, **settings, answer="own")(x) - expected).abs().max() < 1e-12
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
    quick = fast(petal.LAME(small(dtype=torch.float32)[0], **settings))
    assert torch.allclose(quick(batches[0].float()).exp().double(), golden["probabilities"][0], atol=1e-3)


def test_the_rounds_by_hand() -> None:
    model, batches = small()
    x = batches[0, :5]
    adapter = petal.LAME(model, sigma=0.4, weight=0.7, iterations=3)
    with torch.no_grad():
        features, logits = adapter.features(adapter.model, x)
    f = features.numpy() / np.linalg.norm(features.numpy(), axis=1, keepdims=True)
    near = np.exp(-((f[:, None] - f) ** 2).sum(2) / (2 * 0.4**2))
    log_p = np.log(np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True) + 1e-10)
    y = np.exp(log_p) / np.exp(log_p).sum(1, keepdims=True)
    for _ in range(3):
        y = np.exp(log_p + 0.7 * near @ y)
        y /= y.sum(1, keepdims=True)
    np.testing.assert_allclose(adapter(x).exp(), y, atol=1e-10)


def test_settings_change_what_they_say() -> None:
    model, batches = small()
    base = petal.LAME(model)(batches[0])
    for changed in ({"affinity": "knn"}, {"affinity": "linear"}, {"neighbours": 9}, {"sigma": 0.05}, {"weight": 0.1},
                    {"iterations": 1}, {"tolerance": 0.5}):  # fmt: skip
        assert not torch.allclose(base, petal.LAME(model, **changed)(batches[0]), atol=1e-9), changed
    knn = [petal.LAME(model, affinity="knn", symmetric=symmetric)(batches[0]) for symmetric in (False, True)]
    assert not torch.allclose(*knn, atol=1e-9)
    for wrong in ({"affinity": "rbg"}, {"neighbours": 0}, {"sigma": 0}, {"weight": -1}, {"iterations": 0},
                  {"tolerance": -1}, {"answer": "logits"}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            petal.LAME(model, **wrong)


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
def test_small_batches_and_equal_images(affinity: str) -> None:
    model, batches = small()
    adapter = petal.LAME(model, affinity=affinity)
    source = petal.Source(model)(batches[0, :1])
    one = adapter(batches[0, :1])
    assert one.isfinite().all()
    assert one.argmax() == source.argmax()
    if affinity == "knn":
        assert torch.allclose(one, source.log_softmax(1), atol=1e-6)            # no neighbours
    equal = adapter(batches[0, :1].expand(4, -1, -1, -1).contiguous())
    assert equal.isfinite().all()
    assert torch.allclose(equal, equal[:1].expand(4, -1), atol=1e-12)


def test_where_it_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="SmallBatch makes no sense around LAME: it corrects the predictions"):
        petal.SmallBatch(petal.LAME(network()))
    with pytest.raises(InputError, match="this network ends in none"):
        petal.LAME(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))(images())
    guard = petal.Guard(petal.LAME(network("vit")), every=2)
    for seed in range(4):
        assert guard(images(seed=seed)).isfinite().all()
