"""A mix of source and batch statistics, against public code of the field and by hand."""

import pytest
import torch
from torch import nn

import petal
from methods.golden import fast, read, small
from petal.errors import ConfigError
from petal.norm import MixedNorm


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_mix_is_that_of_public_code(share: float) -> None:
    golden, settings = read(f"bn_alpha_{share}")
    model, batches = small()
    adapter = petal.BatchNorm(model, share=settings["share"])
    got = torch.stack([adapter(x) for x in batches])
    assert (got - golden["logits"]).abs().max() < 1e-12
    x = batches[0].clone().requires_grad_(True)
    adapter.model(x).square().sum().backward()
    assert (x.grad - golden["gradient"]).abs().max() < 1e-9        # none through the statistics
    quick = fast(petal.BatchNorm(small(dtype=torch.float32)[0], share=share))
    assert torch.allclose(quick(batches[0].float()).double(), golden["logits"][0], atol=1e-4)


def test_the_ends_of_a_mix_are_source_and_batch() -> None:
    model, batches = small()
    assert torch.allclose(petal.BatchNorm(model, share=0.0)(batches[0]), petal.Source(model)(batches[0]), atol=1e-12)
    layer = nn.BatchNorm1d(2).double().eval()
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 2
    expected = (x - x.mean(0)) / (x.var(0, correction=1) + layer.eps).sqrt()
    assert torch.allclose(MixedNorm(layer, 1.0)(x), expected, atol=1e-12)
    assert torch.allclose(petal.BatchNorm(nn.Sequential(layer), share=1.0)(x), layer.train()(x), atol=1e-12)   # biased


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share must be a number from 0 to 1, got 1\.5"):
        petal.BatchNorm(small()[0], share=1.5)
    with pytest.raises(ConfigError, match="keeps no running statistics"):
        petal.BatchNorm(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), share=0.5)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_one_value_a_channel_has_no_variance_and_is_normalised_as_by_the_source(shape: tuple[int, ...]) -> None:
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3).eval()
    layer.running_mean.copy_(torch.tensor([0.1, 0.5, -2.0]))
    layer.running_var.copy_(torch.tensor([0.3, 2.0, 1.0]))
    x, mixed = torch.rand(shape), MixedNorm(layer, 0.5)
    assert torch.allclose(mixed(x), layer(x), atol=1e-6)
    both = torch.cat([x, x + 1])
    assert not torch.allclose(mixed(both), layer(both), atol=1e-2)
