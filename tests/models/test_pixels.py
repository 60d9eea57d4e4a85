"""The input check: it finds the mistakes, and corrupted images are none."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petal import models
from petal.errors import PetalWarning

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def photographs(count: int = 8) -> Tensor:
    """Smooth images with the statistics of photographs: the whole range, mean 0.45, standard deviation 0.25."""
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = nn.functional.interpolate(noise, (32, 32), mode="bilinear")
    return (0.45 + 0.25 * x / x.std()).clamp(0, 1)


def corruptions() -> dict[str, Tensor]:
    """What the severest corruptions do to the pixels of images in [0, 1]."""
    x, g = photographs(), torch.Generator().manual_seed(1)
    noise = torch.randn(x.shape, generator=g)
    return {
        "none": x,
        "contrast": (x - x.mean((2, 3), keepdim=True)) * 0.05 + x.mean((2, 3), keepdim=True),
        "brightness": (x + 0.5).clamp(0, 1),
        "fog": (x + 2 * 0.7) / 2.4,
        "snow": (0.3 * x + 0.7 + (noise > 1.5) * 0.5).clamp(0, 1),
        "gaussian noise": (x + 0.38 * noise).clamp(0, 1),
        "impulse noise": torch.where(noise > 1, (noise > 1.5).float(), x),
        "dark": x * 0.05,
        "saturated": (20 * x - 10).clamp(0, 1),
        "black": torch.zeros_like(x),
        "white": torch.ones_like(x),
        "one grey image": torch.full((1, 3, 32, 32), 0.5),
        "resampled, not clipped": x * 1.12 - 0.06,
    }


@pytest.mark.parametrize("name", corruptions())
def test_corrupted_images_are_no_mistake(name: str) -> None:
    x = corruptions()[name]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert models.input_problem(models.UNIT_PIXELS, x.to(dtype)) is None


@given(low=st.floats(0, 0.9), span=st.floats(0.05, 1), power=st.floats(0.2, 5))
@settings(max_examples=40, deadline=None)
def test_nothing_within_the_unit_interval_is_a_mistake(low: float, span: float, power: float) -> None:
    x = low + (1 - low) * span * torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) ** power
    assert models.input_problem(models.UNIT_PIXELS, x) is None


MISTAKES = {
    "0..255": (lambda x: x * 255, "divide by 255"),
    "0..255, dark": (lambda x: x * 12, "divide by 255"),
    "0..255, mean taken off": (lambda x: x * 255 - 120, "divide by 255"),
    "bytes": (lambda x: (x * 255).byte(), r"uint8.*/ 255"),
    "ImageNet normalisation": (lambda x: (x - MEAN) / STD, "normalised already"),
    "normalised to [-1, 1]": (lambda x: 2 * x - 1, "normalised already"),
    "divided by std only": (lambda x: x / STD.mean() * 0.8, r"expects \[0, 1\]"),
    "divided by 255 twice": (lambda x: x / 255, "twice"),
    "not finite": (lambda x: x.masked_fill(x > 0.9, float("nan")), "not finite"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("corruption", ["none", "gaussian noise", "saturated"])
def test_mistakes_are_found(name: str, corruption: str) -> None:
    spoil, says = MISTAKES[name]
    x = spoil(corruptions()[corruption])
    model = models.build("small")
    with pytest.warns(PetalWarning, match=says):
        assert not models.check_input(model, x)


def test_networks_that_expect_normalised_input() -> None:
    x = photographs()
    model = models.build("resnet-50", blocks=(1, 1, 1, 1), mean=None, std=None)
    assert models.expected_input(model) == (0.0, 1.0)
    with pytest.warns(PetalWarning, match="expects normalised input"):
        assert not models.check_input(model, x)
    with pytest.warns(PetalWarning, match="divide by 255"):
        models.check_input(model, x * 255)
    for name, corrupted in corruptions().items():
        assert models.input_problem(model, (corrupted - MEAN) / STD) is None, name
    # one flat, bright image: inside [0, 1] once it is normalised
    flat = 0.6 + 0.02 * torch.rand(1, 3, 32, 32)
    assert models.input_problem((0.0, 1.0), (flat - MEAN) / STD) is None


def test_networks_that_expect_bytes() -> None:
    assert models.input_problem(models.BYTE_PIXELS, 255 * photographs()) is None
    problem = models.input_problem(models.BYTE_PIXELS, photographs())
    assert problem is not None
    assert "multiply by 255" in problem


@pytest.mark.parametrize("name", ["wrn-10-1", "resnext-29", "resnet-50", "small", "small-gn", "vit-tiny"])
def test_all_our_networks_expect_the_unit_interval(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
    mean, std = models.expected_input(model)
    assert 0.3 < mean < 0.6
    assert 0.15 < std < 0.35


@pytest.mark.parametrize("module", ["torchvision.models.resnet", "timm.models.vision_transformer"])
def test_plain_library_networks_expect_normalised_input(module: str) -> None:
    plain = type("ResNet", (nn.Conv2d,), {"__module__": module})(3, 4, 1)
    assert models.expected_input(plain) == models.NORMALIZED_PIXELS
    assert models.expected_input(nn.DataParallel(plain)) == models.NORMALIZED_PIXELS
    assert models.expected_input(torch.compile(plain, backend="eager")) == models.NORMALIZED_PIXELS
    plain.normalize = models.Normalize((0.5,), (0.5,))
    assert models.expected_input(plain) == models.UNIT_PIXELS


def test_a_network_can_state_what_it_expects() -> None:
    own = nn.Sequential(nn.Conv2d(3, 4, 1))
    assert models.expected_input(own) == models.UNIT_PIXELS
    own.pixels = (0.0, 1.0)
    assert models.expected_input(own) == models.NORMALIZED_PIXELS


def test_good_input_is_silent_and_nothing_is_changed() -> None:
    x = photographs().requires_grad_()
    before = x.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert models.check_input(models.build("small"), x)
        assert models.check_input(models.UNIT_PIXELS, torch.empty(0, 3, 8, 8))
    assert torch.equal(x, before)
