"""The views against colorsys, SciPy and kornia: the whole pipeline once more, image by image, padded for real."""

import colorsys
import math

import kornia
import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import Tensor

from petal import ConfigError, InputError, Views
from petal.augment import DRAWS, blur, brightness, contrast, gamma, hue, resample, saturation

STILL = {
    "brightness": (1, 1), "contrast": (1, 1), "saturation": (1, 1), "hue": (0, 0), "gamma": (1, 1), "degrees": (0, 0),
    "translate": 0.0, "scale": (1, 1), "sigma": (1e-3, 1e-3), "flip": 0.0, "noise": 0.0,
}  # fmt: skip


FLOOR = 2e-8  # gamma lifts black to 1e-8, as the released code does


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int = 3, channels: int = 3, height: int = 12, width: int = 12, seed: int = 0) -> Tensor:
    """Random images with exact black, white, grey and pure colours among the pixels, in float64."""
    x = torch.rand(n, channels, height, width, generator=generator(seed), dtype=torch.float64)
    x[:, :, 0, :3] = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    if channels == 3:
        x[:, :, 1, :3] = torch.eye(3, dtype=torch.float64)
        x[:, :, 1, 3:6] = 1 - torch.eye(3, dtype=torch.float64)
    return x


# ---------------------------------------------------------------- the reference, one image [C, H, W] at a time


def luma(x: np.ndarray) -> np.ndarray:
    return x[0] if len(x) == 1 else 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def turned(x: np.ndarray, turn: float) -> np.ndarray:
    out = x.copy()
    for i, j in np.ndindex(*x.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*x[:, i, j])
        out[:, i, j] = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
    return out


def reference_colour(number: int, x: np.ndarray, f: float) -> np.ndarray:
    if number == 0:
        return np.clip(f * x, 0, 1)
    if number == 1:
        return np.clip(f * x + (1 - f) * luma(x).mean(), 0, 1)
    if number == 2:
        return x if len(x) == 1 else np.clip(f * x + (1 - f) * luma(x), 0, 1)
    if number == 3:
        return x if len(x) == 1 else turned(x, f)
    return np.clip(x, 1e-8, 1) ** f


def reference_geometry(
    x: np.ndarray, degrees: float, shift: tuple[float, float], scale: float, sigma: float, flip: bool
) -> np.ndarray:
    """Pad by edge, rotate, scale and shift about the centre (x right, y down), blur, crop, flip."""
    _, height, width = x.shape
    pad = (height // 2, width // 2)
    padded = np.pad(x, ((0, 0), (pad[0], pad[0]), (pad[1], pad[1])), mode="edge")
    angle = math.radians(degrees)
    forward = np.eye(3)
    forward[:2, :2] = scale * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    forward[:2, 2] = shift
    centre = np.eye(3)
    centre[:2, 2] = (padded.shape[2] - 1) / 2, (padded.shape[1] - 1) / 2
    inverse = np.linalg.inv(centre @ forward @ np.linalg.inv(centre))  # output pixel -> input pixel, in (x, y)
    swap = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1.0]])
    taps = np.exp(-0.5 * (np.arange(-2, 3) / sigma) ** 2)
    taps /= taps.sum()
    out = []
    for channel in padded:
        channel = scipy.ndimage.affine_transform(channel, swap @ inverse @ swap, order=1, mode="nearest")
        for axis in (0, 1):
            channel = scipy.ndimage.correlate1d(channel, taps, axis, mode="mirror")
        channel = channel[pad[0] : pad[0] + height, pad[1] : pad[1] + width]
        out.append(channel[:, ::-1] if flip else channel)
    return np.stack(out)


def between(ends: tuple[float, float], u: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * u


def reference_view(views: Views, x: Tensor, uniform: Tensor, noise: Tensor) -> np.ndarray:
    order = np.argsort(uniform[0, :5].numpy())
    out = []
    for number, image in enumerate(x.numpy()):
        u = uniform[number if views.per_sample else 0].tolist()
        image = np.clip(image, 0, 1)
        ranges = (views.brightness, views.contrast, views.saturation, views.hue, views.gamma)
        for change in order:
            image = reference_colour(change, image, between(ranges[change], u[5 + change]))
        height, width = image.shape[1:]
        shift = tuple(round((2 * v - 1) * views.translate * 2 * size) for v, size in ((u[11], width), (u[12], height)))
        image = reference_geometry(
            image, between(views.degrees, u[10]), shift, between(views.scale, u[13]), between(views.sigma, u[14]),
            u[15] < views.flip,
        )  # fmt: skip
        out.append(np.clip(image + views.noise * noise[number].numpy(), 0, 1))
    return np.stack(out)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(
    ("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (3, 32, 48), (1, 32, 32), (3, 8, 8), (3, 6, 20)]
)
def test_the_whole_view(per_sample: bool, channels: int, height: int, width: int) -> None:
    views = Views(per_sample=per_sample)
    x = pictures(4, channels, height, width) * 1.2 - 0.1  # some values outside [0, 1]
    kept = x.clone()
    for seed in range(4):
        uniform, noise = views.draw(x, generator(seed))
        got = views.apply(x, uniform, noise)
        np.testing.assert_allclose(got, reference_view(views, x, uniform, noise), rtol=0, atol=1e-8)
    assert torch.equal(x, kept)


def test_the_whole_view_with_wide_ranges() -> None:
    views = Views(
        per_sample=True, brightness=(0, 3), contrast=(0, 3), saturation=(0, 4), hue=(-1, 1), gamma=(0.1, 4),
        degrees=(-180, 180), translate=0.05, scale=(1.5, 3), sigma=(0.5, 3), noise=0.3,
    )  # fmt: skip
    x = pictures(8, 3, 16, 16)
    uniform, noise = views.draw(x, generator(2))
    np.testing.assert_allclose(views.apply(x, uniform, noise), reference_view(views, x, uniform, noise), rtol=0, atol=1e-7)


def test_the_whole_view_in_float32_at_imagenet_size() -> None:
    views = Views()
    x = torch.nn.functional.interpolate(pictures(2), size=(224, 224), mode="bilinear").float()
    moving = {"degrees": (-15, 15), "translate": 1 / 16, "scale": (0.9, 1.1), "flip": 0.5, "sigma": (0.1, 0.5)}
    still = Views(**(STILL | moving))
    for v, tolerance in ((still, 2e-4), (views, None)):
        uniform, noise = v.draw(x, generator(3))
        got = v.apply(x, uniform, noise)
        assert got.shape == x.shape
        assert got.dtype == torch.float32
        if tolerance:
            expected = reference_view(v, x.double(), uniform.double(), noise.double())
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
        else:
            assert (got - v.apply(x.double(), uniform.double(), noise.double())).abs().mean() < 1e-4


# ---------------------------------------------------------------- colour changes


def per_image(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("number", "change", "factors"),
    [
        (0, brightness, (0.6, 1.0, 1.4)),
        (1, contrast, (0.7, 1.0, 1.3)),
        (2, saturation, (0.5, 1.0, 1.5)),
        (3, hue, (-0.06, 0.0, 0.4)),
        (4, gamma, (0.7, 1.0, 1.3)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_colour_changes_by_hand(number: int, change: object, factors: tuple[float, ...], channels: int) -> None:
    x = pictures(3, channels)
    got = change(x, per_image(*factors))
    for image, f, out in zip(x, factors, got, strict=True):
        np.testing.assert_allclose(out, reference_colour(number, image.numpy(), f), atol=1e-8)
    for f in factors:  # one factor for all
        shared = change(x, per_image(f))
        np.testing.assert_allclose(shared, change(x, per_image(f, f, f)), atol=1e-12)


def test_colour_changes_equal_kornia() -> None:
    x = pictures()
    one = per_image(0.8, 1.1, 1.3)
    flat = one.flatten()
    adjust = kornia.enhance
    np.testing.assert_allclose(brightness(x, one), adjust.adjust_brightness_accumulative(x, flat), atol=1e-6)
    np.testing.assert_allclose(gamma(x, one), adjust.adjust_gamma(x, flat), atol=1e-6)
    np.testing.assert_allclose(saturation(x, one), adjust.adjust_saturation_with_gray_subtraction(x, flat), atol=2e-4)
    np.testing.assert_allclose(contrast(x, one), adjust.adjust_contrast_with_mean_subtraction(x, flat), atol=2e-4)
    turn = per_image(-0.06, 0.05, 0.3)
    np.testing.assert_allclose(hue(x, turn), adjust.adjust_hue(x, turn.flatten() * 2 * math.pi), atol=1e-5)


def test_hue_turns_red_to_green_and_all_the_way_round() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    assert torch.allclose(hue(red, torch.full((1, 1, 1, 1), 1 / 3)).flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    x = pictures()
    np.testing.assert_allclose(hue(x, per_image(1.0)), x, atol=1e-12)


def test_every_order_of_the_colour_changes_occurs() -> None:
    x = torch.rand(1, 3, 4, 4)
    orders = {tuple(Views().draw(x, g)[0][0, :5].argsort().tolist()) for g in [generator()] for _ in range(1500)}
    assert len(orders) == math.factorial(5)


# ---------------------------------------------------------------- geometry


def test_identity() -> None:
    x = pictures(3, 3, 9, 14)
    np.testing.assert_allclose(Views(**STILL)(x), x, atol=FLOOR)


def test_flip() -> None:
    x = pictures(3, 3, 8, 14)
    np.testing.assert_allclose(Views(**(STILL | {"flip": 1.0}))(x), x.flip(-1), atol=FLOOR)


@pytest.mark.parametrize(("across", "down"), [(0.0, 0.5), (1 - 1e-9, 0.5), (0.5, 0.0), (0.5, 1 - 1e-9), (0.61, 0.44)])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_translation_moves_whole_pixels(across: float, down: float, flip: float) -> None:
    """At 1/16 of twice the size: up to 4 of 32 columns and 6 of 48 rows, content to the right and down, then flipped."""
    views = Views(**(STILL | {"translate": 1 / 16, "flip": flip}))
    x = pictures(1, 3, 48, 32)
    uniform = torch.full((1, DRAWS), 0.5, dtype=torch.float64)
    uniform[0, 11], uniform[0, 12] = across, down
    dx, dy = round((2 * across - 1) * 4), round((2 * down - 1) * 6)
    rows, columns = np.arange(48) - dy, np.arange(32) - dx
    expected = x.numpy()[:, :, rows.clip(0, 47)][..., columns.clip(0, 31)]
    expected = expected[..., ::-1] if flip else expected
    np.testing.assert_allclose(views.apply(x, uniform, torch.zeros_like(x)), expected, atol=FLOOR)


@pytest.mark.parametrize("turns", [1, -1, 2])
def test_rotation_by_right_angles(turns: int) -> None:
    x = pictures(2, 3, 10, 10)
    got = Views(**(STILL | {"degrees": (90 * turns, 90 * turns)}))(x)
    np.testing.assert_allclose(got, np.rot90(x.numpy(), -turns, axes=(2, 3)), atol=FLOOR)  # positive is clockwise


def test_scale_about_the_centre() -> None:
    x = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    x[..., 6:10, 6:10] = 1
    got = Views(**(STILL | {"scale": (2, 2)}))(x)
    assert got[..., 5:11, 5:11].min() == 1  # larger
    assert got.sum() == pytest.approx(64, rel=0.05)
    assert torch.allclose(got, got.flip(-1))
    assert torch.allclose(got, got.flip(-2))


def test_resample_repeats_the_edges() -> None:
    x = pictures(1, 1, 5, 7)
    far = torch.tensor([[[1.0, 0, 100], [0, 1, 0]]], dtype=torch.float64)
    np.testing.assert_allclose(resample(x, far, 0), x[..., -1:].expand_as(x), atol=1e-12)
    still = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")
    np.testing.assert_allclose(resample(x, still, 2), padded, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.001, 0.25, 0.5, 2.0])
def test_blur(sigma: float) -> None:
    x = pictures(2, 3, 11, 13)
    weights = Views(sigma=(sigma, sigma)).blur_weights(torch.rand(1, DRAWS, dtype=torch.float64))
    assert weights.sum().item() == pytest.approx(1)
    got = blur(x, weights)
    assert got.shape == (2, 3, 7, 9)
    by_kornia = kornia.filters.gaussian_blur2d(x, (5, 5), (sigma, sigma))[..., 2:-2, 2:-2]
    np.testing.assert_allclose(got, by_kornia, atol=1e-6)
    by_scipy = scipy.ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), radius=(0, 0, 2, 2))[..., 2:-2, 2:-2]
    np.testing.assert_allclose(got, by_scipy, atol=1e-12)


# ---------------------------------------------------------------- options and draws


@pytest.mark.parametrize(
    ("option", "value"),
    [("brightness", (0.9, 0.95)), ("contrast", (0.2, 0.4)), ("saturation", (0.1, 0.2)), ("hue", (0.2, 0.3)),
     ("gamma", (2, 3)), ("degrees", (30, 40)), ("translate", 0.3), ("scale", (2, 3)), ("sigma", (2, 3)), ("flip", 1.0),
     ("noise", 0.1), ("per_sample", True)],
)  # fmt: skip
def test_every_option_counts(option: str, value: object) -> None:
    x = pictures()
    plain = Views(flip=0.0)(x, generator())
    assert torch.equal(plain, Views(flip=0.0)(x, generator()))
    assert not torch.allclose(plain, Views(**({"flip": 0.0} | {option: value}))(x, generator()), atol=1e-3)


def test_one_draw_for_all_or_one_each() -> None:
    one = pictures(1, 3, 32, 32).expand(6, -1, -1, -1)
    together = Views(noise=0.0)(one, generator())
    assert torch.equal(together, together[:1].expand_as(together))
    apart = Views(noise=0.0, per_sample=True)(one, generator())
    distances = (apart[:, None] - apart[None]).abs().amax((2, 3, 4))
    assert (distances[~torch.eye(6, dtype=torch.bool)] > 1e-2).all()
    noisy = Views(**(STILL | {"noise": 0.1}))(one, generator())
    assert not torch.equal(noisy[0], noisy[1]), "noise is every image's own"


def test_a_batch_of_draws_is_applied_row_by_row() -> None:
    views = Views(per_sample=True)
    x = pictures(3, 3, 16, 16)
    uniform, noise = views.draw(x, generator())
    uniform[:, :5] = uniform[0, :5]  # one order of colour changes a view
    whole = views.apply(x, uniform, noise)
    for i in range(3):
        np.testing.assert_allclose(whole[i], views.apply(x[i : i + 1], uniform[i : i + 1], noise[i : i + 1])[0], atol=1e-12)


def test_generators() -> None:
    x, views = pictures(), Views()
    g = generator(4)
    first, second = views(x, g), views(x, g)
    assert not torch.equal(first, second)
    assert torch.equal(first, views(x, generator(4)))
    assert not torch.equal(first, views(x, generator(5)))
    state = torch.get_rng_state()
    views(x, generator(1))
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not touched"
    torch.manual_seed(3)
    third = views(x)
    torch.manual_seed(3)
    assert torch.equal(third, views(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(28, 28), (32, 48), (224, 224), (1, 1), (3, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_type_and_range(dtype: torch.dtype, size: tuple[int, int], channels: int) -> None:
    x = pictures(2, channels, 6, 6)
    x = torch.nn.functional.interpolate(x, size=size, mode="bilinear").to(dtype)
    for per_sample in (False, True):
        out = Views(per_sample=per_sample, noise=0.2)(x, generator())
        assert out.shape == x.shape
        assert out.dtype == dtype
        assert ((out >= 0) & (out <= 1)).all()
    if dtype in (torch.bfloat16, torch.float16) and size == (224, 224):
        fine, coarse = (Views(noise=0.0)(v, generator()).float() for v in (x.float(), x))
        assert (fine - coarse).abs().max() < 0.01


def test_draws_fill_the_stated_ranges() -> None:
    views = Views(per_sample=True)
    x = torch.zeros(20_000, 1, 1, 1)
    uniform, noise = views.draw(x, generator())
    assert uniform.shape == (20_000, DRAWS)
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    factors = views.factors(uniform)
    stated = [(0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)]
    for column, (low, high) in zip(factors.T, stated, strict=True):
        check_uniform(column, low, high)
    affine = views.affine(uniform, torch.Size([48, 32])).double()
    sign = torch.where(torch.linalg.det(affine[:, :, :2]) < 0, -1.0, 1.0).double()
    assert abs((sign < 0).double().mean() - 0.5) < 0.02
    scale = 1 / torch.linalg.det(affine[:, :, :2]).abs().sqrt()
    check_uniform(scale, 0.9, 1.1)
    check_uniform(torch.rad2deg(torch.atan2(affine[:, 0, 1], affine[:, 1, 1])), -15, 15)
    forward = torch.linalg.inv(affine[:, :, :2])
    shift = -(forward @ affine[:, :, 2:])[..., 0] * torch.stack([sign, torch.ones_like(sign)], 1)
    assert torch.allclose(shift, shift.round(), atol=1e-4)
    assert set(shift[:, 0].round().int().tolist()) == set(range(-4, 5))
    assert set(shift[:, 1].round().int().tolist()) == set(range(-6, 7))
    correlations = np.corrcoef(np.c_[factors, scale, shift, sign].T)
    assert np.abs(correlations - np.eye(len(correlations))).max() < 0.04, "draws are independent of each other"
    taps = views.blur_weights(uniform).double()
    sigma = (0.5 / (taps[:, 2] / taps[:, 3]).log()).sqrt()
    check_uniform(sigma[taps[:, 3] > 1e-30], 0.001, 0.5, low_open=True)


def check_uniform(values: Tensor, low: float, high: float, low_open: bool = False) -> None:
    slack = 1e-4 * (high - low)
    assert values.min() >= low - slack
    assert values.max() <= high + slack
    assert values.max() > high - 0.01 * (high - low)
    if not low_open:
        assert values.min() < low + 0.01 * (high - low)
        assert values.double().mean().item() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))


@pytest.mark.parametrize(
    ("option", "value"),
    [("brightness", (1.4, 0.6)), ("brightness", (-0.1, 1)), ("contrast", (-1, 1)), ("saturation", (-1, 1)),
     ("gamma", (-1, 1)), ("scale", (0, 1)), ("sigma", (0, 1)), ("sigma", (-1, 1)), ("hue", (math.nan, 1)),
     ("degrees", (0, math.inf)), ("flip", 1.1), ("flip", -0.1), ("translate", -0.1), ("noise", -1),
     ("flip", math.nan), ("noise", math.nan), ("translate", math.nan)],
)  # fmt: skip
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        Views(**{option: value})


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 8, 8), (2, 2, 8, 8), (2, 8), (2, 3, 4, 8, 8)])
def test_bad_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"\[N, 3, H, W\]"):
        Views()(torch.rand(shape))


def test_is_a_frozen_value() -> None:
    assert Views() == Views(per_sample=False)
    assert Views() != Views(noise=0.0)
    with pytest.raises(AttributeError):
        Views().noise = 1.0
