"""Destroyed images against NumPy and Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from petal.destroy import Occlusion, Patches, Pixels
from petal.errors import ConfigError, InputError


def images(n: int = 3, height: int = 12, width: int = 8) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(0))


def draws(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiles(image: np.ndarray, k: int) -> list[np.ndarray]:
    """The patches of an image [C, H, W], row by row."""
    return [tile for row in np.split(image, k, axis=1) for tile in np.split(row, k, axis=2)]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_patches_in_an_order_of_its_own_for_each_image(k: int) -> None:
    x = images(6)
    moved = Patches(k)(x, generator=draws())
    orders = []
    for before, after in zip(x.numpy(), moved.numpy(), strict=True):
        known = tiles(before, k)
        orders.append([next(i for i, tile in enumerate(known) if np.array_equal(tile, other)) for other in tiles(after, k)])
        assert sorted(orders[-1]) == list(range(k * k))
    assert (len({tuple(order) for order in orders}) > 1) is (k > 1)
    assert torch.equal(Patches(k)(x, generator=draws()), moved)
    assert torch.equal(Patches(k)(x, generator=draws(6)), moved) is (k == 1)


def test_sides_that_do_not_divide_are_resized_as_pillow_does() -> None:
    def resized(image: np.ndarray, width: int, height: int) -> np.ndarray:
        return np.stack([Image.fromarray(channel).resize((width, height), Image.Resampling.BILINEAR) for channel in image])

    x = images(1, 11, 7)
    known = tiles(resized(x[0].numpy(), 6, 9), 3)
    order = torch.rand(1, 9, generator=draws()).argsort(-1)[0].tolist()
    rows = [np.concatenate([known[order[3 * i + j]] for j in range(3)], axis=2) for i in range(3)]
    expected = resized(np.concatenate(rows, axis=1), 7, 11)
    assert np.allclose(Patches(3)(x, generator=draws())[0], expected, atol=1e-5)


def test_pixels_in_one_order_for_all_images() -> None:
    x = images()
    moved = Pixels()(x, generator=draws())
    order = torch.randperm(96, generator=draws()).tolist()
    assert np.array_equal(moved.numpy().reshape(3, 3, 96), x.numpy().reshape(3, 3, 96)[:, :, order])
    assert not torch.equal(moved, Pixels()(x, generator=draws(6)))


def test_a_square_of_the_mean_colour() -> None:
    x = images()
    covered = Occlusion(4, 2, 1)(x)
    expected = x.numpy().copy()
    for image in expected:
        image[:, 2:6, 1:5] = image.mean((1, 2))[:, None, None]
    assert np.allclose(covered, expected, atol=1e-6)
    assert torch.equal(x, images())                                         # the image itself stays


def test_what_does_not_fit() -> None:
    for wrong in (lambda: Patches(0), lambda: Occlusion(0), lambda: Occlusion(4, -1)):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(InputError, match=r"Patches\(9\) needs images of 9 by 9"):
        Patches(9)(images())
    with pytest.raises(InputError, match="does not fit images of 12 by 8"):
        Occlusion(4, 2, 5)(images())
    for destroy in (Patches(), Pixels(), Occlusion(1, 0, 0)):
        with pytest.raises(InputError, match="give DeYO a `destroy` of your own"):
            destroy(torch.rand(4, 7))
