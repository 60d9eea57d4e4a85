import colorsys

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from petal.corruptions import corrupt, digital
from petal.corruptions.constants import CONSTANTS
from petal.corruptions.random import KeyedRandom


def colours() -> torch.Tensor:
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x[0, :, 0, 0] = 0.0
    x[0, :, 0, 1] = 1.0
    x[0, :, 0, 2] = 0.4  # grey
    x[0, :, 0, 3] = torch.tensor([0.7, 0.7, 0.1])
    x[0, :, 0, 4] = torch.tensor([0.0, 0.0, 1.0])
    return x


@pytest.mark.parametrize("profile", ["cifar", "imagenet"])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_hsv_corruptions_match_colorsys(name: str, severity: int, profile: str) -> None:
    x = colours()
    out = corrupt(x, name, severity, profile)
    c = CONSTANTS[profile][name][severity - 1]
    for i in range(8):
        for j in range(8):
            h, s, v = colorsys.rgb_to_hsv(*x[0, :, i, j].double().tolist())
            if name == "brightness":
                v = min(v + c, 1.0)
            else:
                s = min(max(s * c[0] + c[1], 0.0), 1.0)
            np.testing.assert_allclose(out[0, :, i, j], colorsys.hsv_to_rgb(h, s, v), atol=1e-6)


def test_contrast_pulls_towards_the_mean_of_each_channel(pictures: torch.Tensor) -> None:
    image = pictures.double().numpy()
    mean = image.mean(axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(corrupt(pictures, "contrast", 4), (image - mean) * 0.3 + mean, atol=1e-6)


@pytest.mark.parametrize("profile", ["cifar", "imagenet"])
@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("height,width", [(32, 32), (45, 37)])
def test_pixelate_is_pillows_box_resize(profile: str, severity: int, height: int, width: int) -> None:
    x = torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(0)).float() / 255
    c = CONSTANTS[profile]["pixelate"][severity - 1]
    out = corrupt(x, "pixelate", severity, profile).mul(255).round().byte()
    for image, got in zip(x, out, strict=True):
        picture = Image.fromarray(image.mul(255).round().byte().permute(1, 2, 0).numpy())
        small = picture.resize((int(width * c), int(height * c)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((width, height), Image.Resampling.BOX))
        np.testing.assert_array_equal(got.permute(1, 2, 0), expected)


@pytest.mark.parametrize("profile,severity,height,width", [
    ("cifar", 1, 32, 32), ("cifar", 2, 32, 32), ("cifar", 5, 32, 32), ("cifar", 3, 33, 48), ("imagenet", 1, 64, 64),
])  # fmt: skip
def test_elastic_is_an_affine_map_then_a_displacement(profile: str, severity: int, height: int, width: int) -> None:
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    strength, sigma, jitter, unit = CONSTANTS[profile]["elastic_transform"][severity - 1]
    side = min(height, width) * unit
    out = corrupt(x, "elastic_transform", severity, profile, keys=torch.arange(2))
    draws = KeyedRandom(torch.arange(2))
    moves = draws.uniform((3, 2), -jitter * side, jitter * side).double().numpy()
    fields = draws.uniform((2, height, width), -1, 1).double().numpy()
    rows, columns = np.mgrid[:height, :width].astype(float)
    cx, cy, s = width // 2, height // 2, min(height, width) // 3
    points = np.array([[cx + s, cy + s], [cx + s, cy - s], [cx - s, cy - s]], dtype=float)
    for i in range(2):
        forward = np.linalg.solve(np.c_[points, np.ones(3)], points + moves[i]).T  # 2 x 3
        back = np.linalg.inv(np.r_[forward, [[0, 0, 1]]])
        at_column, at_row, _ = np.einsum("ij,jhw->ihw", back, np.stack((columns, rows, np.ones_like(rows))))
        for channel in range(3):
            plane = x[i, channel].double().numpy()
            plane = ndimage.map_coordinates(plane, (at_row, at_column), order=1, mode="mirror")
            if strength:
                dx, dy = (
                    ndimage.gaussian_filter(f, sigma * side, mode="reflect", truncate=3) * strength * side for f in fields[i]
                )
                plane = ndimage.map_coordinates(plane, (rows + dy, columns + dx), order=1, mode="reflect")
            # float32 coordinates: a steep noise picture of 64 pixels turns 1e-5 of a pixel into as much of a value
            np.testing.assert_allclose(out[i, channel], plane, atol=1e-4)


def test_affine_inverse_takes_the_moved_points_back() -> None:
    moves = KeyedRandom(torch.arange(4)).uniform((3, 2), -2.5, 2.5).double()
    rows = digital._affine_inverse(moves, 32, 40)
    points = torch.tensor([[30.0, 26.0], [30.0, 6.0], [10.0, 6.0]], dtype=torch.float64)
    for i in range(4):
        for point, move in zip(points, moves[i], strict=True):
            x, y = point + move
            got = [float(a[i] * x + b[i] * y + c[i]) for a, b, c in rows]
            assert got == pytest.approx(point.tolist(), abs=1e-9)
