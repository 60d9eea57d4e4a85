"""Batch statistics of bounded influence, against NumPy, and in methods and engine."""

import numpy as np
import pytest
import torch
from torch import nn

import petal
from networks import images, network
from petal import ConfigError, InputError
from petal.engine import Policy
from petal.norm import BoundedNorm, robust_statistics


def by_numpy(x: np.ndarray, kind: str, reach: float) -> np.ndarray:
    def middle(values: np.ndarray) -> np.ndarray:
        center = np.median(values, 0)
        if kind == "clipped":
            limit = reach * np.median(np.abs(values - center), 0)
            center = np.clip(values, center - limit, center + limit).mean(0)
        return center

    means = x.mean((2, 3))
    mean = middle(means)
    var = middle(x.var((2, 3)) + (means - mean) ** 2)
    return (x - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]


def layer_of(kind: str, reach: float = 1.0) -> nn.Module:
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean = layer.running_var = None
    layer.track_running_stats = False
    return BoundedNorm(layer, kind, reach)


@pytest.mark.parametrize(("kind", "reach", "count"), [("median", 1.0, 7), ("median", 1.0, 8), ("clipped", 1.0, 8),
                                                      ("clipped", 2.5, 7)])  # fmt: skip
def test_as_numpy_has_it(kind: str, reach: float, count: int) -> None:
    x = np.random.default_rng(0).normal(1.0, 2.0, (count, 3, 4, 5)) * np.arange(1, count + 1)[:, None, None, None]
    found = layer_of(kind, reach)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(found, by_numpy(x, kind, reach), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["median", "clipped", "screened"])
def test_one_image_has_little_influence(kind: str) -> None:
    x = images(16)
    y = x.clone()
    y[3] = 1e6
    others = torch.arange(16) != 3
    before, after = (layer_of(kind)(z)[others] for z in (x, y))
    assert (before - after).abs().max() < 1.0
    plain = layer_of("clipped", 1e9)(y)[others]                 # the mean: all of it is decided by one image
    assert plain.std() < 0.01


def test_strange_images_do_not_count_when_screened() -> None:
    x = images(16)
    y = x.clone()
    y[:5] = 50.0 + torch.rand(5, 1, 1, 1)
    expected = layer_of("median")(x[5:])
    assert torch.allclose(layer_of("screened")(y)[5:], expected, atol=1e-5)
    assert not torch.allclose(layer_of("median")(y)[5:], expected, atol=0.05)


def test_vectors_have_the_spread_that_batch_norm_gives_normal_numbers() -> None:
    x = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1
    layer = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    for kind, spread in (("median", 1.0), ("screened", 1.0)):
        found = BoundedNorm(layer, kind)(x)
        assert found.mean().abs() < 0.05
        assert found.std() == pytest.approx(spread, abs=0.1)


def test_straight_gradients_are_those_of_the_mean() -> None:
    layer = layer_of("median")
    x = images(9).requires_grad_(True)
    mean, _ = layer.statistics(x)
    (sparse,) = torch.autograd.grad(mean.sum(), x)
    layer.straight = True
    straight, _ = layer.statistics(x)
    (full,) = torch.autograd.grad(straight.sum(), x)
    assert torch.equal(mean, straight.detach()) or torch.allclose(mean, straight)
    assert torch.allclose(full, torch.full_like(full, 1 / x[:, 0].numel()))
    assert (sparse == 0).float().mean() > 0.5


def test_running_statistics_are_used_where_there_are_some() -> None:
    model = network()
    robust = robust_statistics(model, "median")
    x = images(4)
    assert torch.allclose(model.eval()(x), robust.eval()(x), atol=1e-6)
    assert [type(layer) for layer in robust.modules()].count(BoundedNorm) == 2
    assert dict(robust.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert robust_statistics(model, "batch") is model


@pytest.mark.parametrize("kind", ["median", "clipped", "screened"])
def test_a_network_with_them_is_a_method_s_with_robust_around_it_and_the_engine_s(kind: str) -> None:
    x = [images(seed=seed) for seed in range(3)]
    first = petal.Tent(robust_statistics(network(), kind))
    second = petal.Robust(petal.Tent(network()), kind)
    third = petal.accelerate(petal.Robust(petal.Tent(network()), kind), policy=Policy())
    plain = petal.Tent(network())
    answers = [[adapter(batch) for batch in x] for adapter in (first, second, third, plain)]
    assert all(torch.equal(a, b) for a, b in zip(answers[0], answers[1], strict=True))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(answers[0], answers[2], strict=True))
    assert not torch.allclose(answers[0][0], answers[3][0], atol=1e-3)


def test_robust_limits_the_step() -> None:
    x = images()

    def moved(step: float | None) -> float:
        adapter = petal.Robust(petal.Tent(network(), lr=0.1), "batch", step=step)
        before = adapter.origin()
        adapter(x)
        way = torch.stack([(p - before[n]).norm() for n, p in adapter.adapted.items()]).norm()
        return float(way.detach() / torch.stack([p.norm() for p in before.values()]).norm())

    assert moved(1e-3) == pytest.approx(1e-3, rel=1e-3)
    assert moved(None) > 1e-2
    assert moved(1.0) == pytest.approx(moved(None))


def test_a_teacher_follows_the_limited_step() -> None:
    options = petal.recommended.flagship() | {"ema": 0.5, "warmup": None}
    adapters = [petal.Robust(petal.Petal(network(), **options), "batch", step=1e-4) for _ in range(2)]
    petal.accelerate(adapters[1], policy=Policy())
    for adapter in adapters:
        before = adapter.origin()
        adapter(images())
        for name, teacher in adapter.teacher.named_parameters():
            assert torch.allclose(teacher, (before[name] + adapter.adapted[name]) / 2, atol=1e-7)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="statistics must be one of 'batch', 'median', 'clipped', 'screened', got 'mean'"):
        petal.Robust(petal.Tent(network()), "mean")
    with pytest.raises(ConfigError, match="reach is a number above 0"):
        robust_statistics(network(), "clipped", 0.0)
    with pytest.raises(ConfigError, match="accelerated"):
        petal.Robust(petal.accelerate(petal.Tent(network()), policy=Policy()))
    with pytest.raises(ConfigError, match="learns nothing"):
        petal.Robust(petal.BatchNorm(network()), step=1e-3)
    with pytest.raises(ConfigError, match="not by batch statistics"):
        petal.Robust(petal.RoTTA(network()))
    with pytest.raises(ConfigError, match="swap the two"):
        petal.Robust(petal.Guard(petal.Tent(network())))
    vectors = petal.Robust(petal.Tent(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()))
    refused = pytest.raises(InputError, match=r"batch norm '1' sees one value a channel")
    with pytest.warns(petal.PetalWarning, match="one sample"), refused:
        vectors(torch.rand(1, 3))
