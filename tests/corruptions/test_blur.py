import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from petal.corruptions import blur, corrupt, linear
from petal.corruptions.constants import CONSTANTS
from petal.corruptions.random import KeyedRandom


def keys(n: int) -> KeyedRandom:
    return KeyedRandom(torch.arange(n))


@pytest.mark.parametrize("profile,side", [("cifar", 32), ("imagenet", 50)])
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_gaussian_blur_is_scipys(profile: str, side: int, severity: int) -> None:
    x = torch.rand(2, 3, side, side + 3, generator=torch.Generator().manual_seed(0))
    sigma = CONSTANTS[profile]["gaussian_blur"][severity - 1]
    expected = ndimage.gaussian_filter(x.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
    np.testing.assert_allclose(corrupt(x, "gaussian_blur", severity, profile), expected, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.96, 6.4, 171.0])
def test_wide_mirrored_blur_is_scipys(sigma: float) -> None:
    x = torch.rand(2, 40, 33, generator=torch.Generator().manual_seed(0))
    expected = ndimage.gaussian_filter(x.double().numpy(), (0, sigma, sigma), mode="reflect", truncate=3)
    np.testing.assert_allclose(linear.blur(x, sigma, 3.0, "reflect"), expected, atol=1e-6)


@pytest.mark.parametrize("profile", ["cifar", "imagenet"])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_defocus_blur_is_a_filter_with_the_smoothed_disk(profile: str, severity: int, pictures: torch.Tensor) -> None:
    radius, smoothing = CONSTANTS[profile]["defocus_blur"][severity - 1]
    half, reach = (8, 1) if radius <= 8 else (radius, 2)
    disk = np.array([[float(i * i + j * j <= radius**2) for j in range(-half, half + 1)] for i in range(-half, half + 1)])
    disk = ndimage.gaussian_filter(disk / disk.sum(), smoothing, mode="mirror", radius=reach)
    out = corrupt(pictures, "defocus_blur", severity, profile)
    for image, plane in zip(pictures[:2, 1], out[:2, 1], strict=True):
        np.testing.assert_allclose(plane, ndimage.correlate(image.double().numpy(), disk, mode="mirror"), atol=3e-6)


def loop_copies(image: np.ndarray, moved: np.ndarray, distance: int) -> np.ndarray:
    """The published double loop, literally."""
    image = image.copy()
    height, width = image.shape[:2]
    for h in range(height - distance, distance, -1):
        for w in range(width - distance, distance, -1):
            dy, dx = moved[:, h - distance - 1, w - distance - 1]
            image[h, w] = image[h + dy, w + dx]
    return image


@pytest.mark.parametrize("distance,height,width", [(1, 32, 32), (2, 32, 29), (3, 17, 24), (4, 40, 32)])
def test_copies_are_those_of_the_loop(distance: int, height: int, width: int) -> None:
    moved = keys(3).integers((2, height - 2 * distance, width - 2 * distance), -distance, distance)
    source = blur.copy_map(moved, distance, height, width)
    image = np.arange(height * width).reshape(height, width)
    for one, index in zip(moved.numpy(), source.numpy(), strict=True):
        np.testing.assert_array_equal(index.reshape(height, width), loop_copies(image, one, distance))


def test_longest_possible_chain_of_copies() -> None:
    moved = torch.zeros(1, 2, 28, 28, dtype=torch.int64)
    moved[:, 1] = 1  # every pixel takes its right neighbour's, all along the row
    source = blur.copy_map(moved, 2, 32, 32).view(32, 32).numpy()
    np.testing.assert_array_equal(source, loop_copies(np.arange(1024).reshape(32, 32), moved[0].numpy(), 2))


@pytest.mark.parametrize("profile,severity", [("cifar", 1), ("cifar", 5), ("imagenet", 3)])
def test_glass_blur_is_blur_truncate_copy_blur(profile: str, severity: int, pictures: torch.Tensor) -> None:
    sigma, distance, passes = CONSTANTS[profile]["glass_blur"][severity - 1]
    out = corrupt(pictures[:2], "glass_blur", severity, profile, keys=torch.arange(2))
    draws = keys(2)
    moved = [draws.integers((2, 32 - 2 * distance, 32 - 2 * distance), -distance, distance) for _ in range(passes)]

    def smooth(image: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=4)

    for i in range(2):
        image = pictures[i].permute(1, 2, 0).double().numpy()
        image = np.floor(smooth(image).astype(np.float32) * np.float32(255))
        for one in moved:
            image = loop_copies(image, one[i].numpy(), distance)
        np.testing.assert_allclose(out[i].permute(1, 2, 0), smooth(image.astype(np.float64) / 255).clip(0, 1), atol=1e-6)


@pytest.mark.parametrize("radius,sigma,angle", [(6, 1.0, 0.0), (9, 2.5, 37.0), (9, 2.5, -45.0), (14, 12.0, -100.0)])
def test_motion_filter_sums_its_taps(radius: int, sigma: float, angle: float) -> None:
    x = torch.rand(1, 3, 20, 26, generator=torch.Generator().manual_seed(0))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    expected = np.zeros((3, 20, 26))
    for i, weight in enumerate(weights):
        dx = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        dy = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        rows, columns = np.arange(20) + dy, np.arange(26) + dx
        expected += weight / sum(weights) * x[0].numpy()[:, rows.clip(0, 19)][:, :, columns.clip(0, 25)]
    np.testing.assert_allclose(blur.motion_filter(x, radius, sigma, torch.tensor([angle]))[0], expected, atol=1e-6)


def test_motion_blur_turns_each_image_its_own_way() -> None:
    x = torch.zeros(60, 3, 32, 32)
    x[:, :, 16, 25] = 1.0
    out = corrupt(x, "motion_blur", 5, keys=torch.arange(60))
    rows, columns = torch.arange(32.0)[:, None], torch.arange(32.0)
    down = (out * (16 - rows)).sum((1, 2, 3)) / 3
    right = (out * (25 - columns)).sum((1, 2, 3)) / 3
    angle = torch.rad2deg(torch.atan2(down, right))
    assert angle.min() > -50
    assert angle.max() < 50
    assert angle.min() < -30
    assert angle.max() > 30
    assert out.flatten(1).sum(1).allclose(torch.tensor(3.0))


def scipy_zoom(image: np.ndarray, factor: float) -> np.ndarray:
    height, width = image.shape[1:]
    tall, wide = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - tall) // 2, (width - wide) // 2
    crop = image[:, top : top + tall, left : left + wide]
    crop = ndimage.zoom(crop, (1, factor, factor), order=1, mode="nearest")
    top, left = (crop.shape[1] - height) // 2, (crop.shape[2] - width) // 2
    return crop[:, top : top + height, left : left + width]


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.25, 1.75, 2.25, 4.5])
def test_zoom_is_scipys(factor: float) -> None:
    x = torch.rand(1, 3, 32, 43, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(blur.zoom(x, factor)[0], scipy_zoom(x[0].double().numpy(), factor), atol=5e-6)


@pytest.mark.parametrize("profile,side,severity", [("cifar", 32, 1), ("cifar", 32, 5), ("imagenet", 56, 5)])
def test_zoom_blur_is_the_mean_of_its_zooms(profile: str, side: int, severity: int) -> None:
    x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    count, step = CONSTANTS[profile]["zoom_blur"][severity - 1]
    image = x[1].double().numpy()
    total = image + sum(scipy_zoom(image, float(f)) for f in np.arange(1, 1 + (count - 0.5) * step, step))
    np.testing.assert_allclose(corrupt(x, "zoom_blur", severity, profile)[1], total / (count + 1), atol=2e-6)


def test_both_ways_of_zoom_blur_agree(monkeypatch: pytest.MonkeyPatch, pictures: torch.Tensor) -> None:
    dense = corrupt(pictures, "zoom_blur")
    monkeypatch.setattr(blur, "_DENSE_PIXELS", 0)
    assert torch.allclose(dense, corrupt(pictures, "zoom_blur"), atol=1e-6)
