"""AugMix: each operation against Pillow's, and how chains are mixed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from petal import AugMix, ConfigError, InputError
from petal.augment import MOVES, OPERATIONS

LEVELS = AugMix(severity=10.0)


def pictures(n: int, height: int = 20, width: int = 28, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(n, channels, 1, 1, generator=generator)
    return (200 * spread * torch.rand(n, channels, height, width, generator=generator) + 20).round().double() / 255


def pil(x: Tensor) -> Image.Image:
    return Image.fromarray((255 * x).round().byte().permute(1, 2, 0).numpy())


def back(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255


def moved(image: Image.Image, *map_: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, map_, resample=Image.Resampling.BILINEAR)


PILLOW: list[Callable[[Image.Image, float, int], Image.Image]] = [     # an image, a level to 10, a sign
    lambda image, level, sign: ImageOps.autocontrast(image),
    lambda image, level, sign: ImageOps.equalize(image),
    lambda image, level, sign: ImageOps.posterize(image, 4 - int(0.4 * level)),
    lambda image, level, sign: ImageOps.solarize(image, 256 - int(25.6 * level)),
    lambda image, level, sign: image.rotate(sign * int(3 * level), resample=Image.Resampling.BILINEAR),
    lambda image, level, sign: moved(image, 1, sign * 0.03 * level, 0, 0, 1, 0),
    lambda image, level, sign: moved(image, 1, 0, 0, sign * 0.03 * level, 1, 0),
    lambda image, level, sign: moved(image, 1, 0, sign * int(level * image.width / 30), 0, 1, 0),
    lambda image, level, sign: moved(image, 1, 0, 0, 0, 1, sign * int(level * image.height / 30)),
]


@pytest.mark.parametrize("number", range(OPERATIONS))
def test_operations_are_pillows(number: int) -> None:
    x, draws = pictures(12), torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[0] = x[0, :, :1, :1]                                                      # of one colour
    got = LEVELS.changed(x, (number + draws[0]) / OPERATIONS, draws[1], draws[2])
    for image, result, level, side in zip(x, got, draws[1].tolist(), draws[2].tolist(), strict=True):
        wanted = back(PILLOW[number](pil(image), 0.1 + 9.9 * level, -1 if side < 0.5 else 1))
        off = (result - wanted).abs().amax(0)
        # Pillow truncates what it interpolates, and takes no pixel that is half outside
        allowed = 0 if number in (1, 2, 3, 7, 8) else 1.01 / 255
        assert (off <= allowed + 1e-9).double().mean() > (0.85 if number in (4, 5, 6) else 0.999)
        assert off.median() <= allowed


def test_an_operation_does_something() -> None:
    x = pictures(OPERATIONS)
    which = (torch.arange(OPERATIONS) + 0.5).double() / OPERATIONS
    strong = LEVELS.changed(x, which, torch.full_like(which, 0.6), torch.ones_like(which))
    assert all(not torch.allclose(a, b, atol=0.02) for a, b in zip(x, strong, strict=True))
    weak = AugMix().changed(x, which, torch.zeros_like(which), torch.ones_like(which))
    assert all(torch.allclose(weak[n], x[n], atol=1e-6) for n in (3, 4, 7, 8))          # less than one whole step


def draws_of(mix: AugMix, seed: int, count: int) -> Tensor:
    size = MOVES + mix.width * (2 + 3 * mix.depth)
    return torch.rand(count, size, generator=torch.Generator().manual_seed(seed)).double()


def test_chains_are_mixed_as_drawn() -> None:
    x, mix = pictures(5), AugMix(severity=4.0, width=2, depth=3, padding=0, flip=0.0)
    got = mix(x, generator=torch.Generator().manual_seed(3))
    for image, draws, view in zip(x, draws_of(mix, 3, 5), got, strict=True):
        share, chains = draws[5], draws[MOVES:].view(2, 11)
        weights = -chains[:, 0].log()
        mixed = torch.zeros_like(image)
        for chain, weight in zip(chains, weights / weights.sum(), strict=True):
            out = image[None]
            for which, level, sign in chain[2:].view(3, 3)[: 1 + int(3 * chain[1])]:
                out = mix.changed(out, which[None], level[None], sign[None])
            mixed += weight * out[0]
        assert torch.allclose(view, share * image + (1 - share) * mixed, atol=1e-6)


def test_images_are_moved_or_cropped_and_flipped() -> None:
    x = pictures(6, 9, 9)
    draws = torch.zeros(6, MOVES, dtype=torch.float64)
    draws[:, 2:4], draws[3:, 4] = torch.tensor([0.99, 0.0]), 0.9            # to the right, up, the first three flipped
    got = AugMix(padding=2, fill=0.5).moved(x, draws)
    wanted = torch.nn.functional.pad(x, [2] * 4, value=0.5)[:, :, :9, 4:]
    assert torch.allclose(got, torch.cat([wanted[:3].flip(-1), wanted[3:]]), atol=1e-9)
    corner = AugMix(crop=(0.25, 0.25), flip=0.0).moved(pictures(1, 8, 8), torch.tensor([[0.0, 0.5, 0, 0, 0, 0]]).double())
    area = torch.nn.functional.interpolate(pictures(1, 8, 8)[..., :4, :4], size=8, mode="bilinear", align_corners=False)
    assert torch.allclose(corner[..., 1:7, 1:7], area[..., 1:7, 1:7], atol=1e-9)


def test_every_image_has_a_view_of_its_own_that_a_seed_repeats() -> None:
    x = pictures(1, 16, 16).float().expand(8, -1, -1, -1)
    view = AugMix()(x, generator=torch.Generator().manual_seed(0))
    assert torch.equal(view, AugMix()(x, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(view, AugMix()(x, generator=torch.Generator().manual_seed(1)))
    assert all(not torch.allclose(view[i], view[j], atol=1e-3) for i in range(8) for j in range(i))
    assert view.amin() >= 0
    assert view.amax() <= 1
    for kind, channels in ((torch.float16, 3), (torch.float64, 1)):
        other = AugMix()(pictures(4, channels=channels).to(kind))
        assert (other.dtype, other.shape) == (kind, (4, channels, 20, 28))
    others = {"severity": 3.0, "width": 1, "depth": 1, "padding": 0, "flip": 0.0, "fill": 0.5, "crop": (0.1, 1)}
    for options in ({name: value} for name, value in others.items()):
        assert not torch.equal(view, AugMix(**options)(x, generator=torch.Generator().manual_seed(0)))


def test_what_makes_no_sense() -> None:
    for options, words in (
        ({"width": 0}, "width and depth from 1"), ({"depth": 1.5}, "width and depth from 1"),
        ({"padding": -1}, "padding from 0"),
        ({"severity": 0}, "severity in"), ({"flip": 2}, "flip and fill"), ({"fill": -1}, "flip and fill"),
        ({"crop": (0, 1)}, "crop of AugMix"), ({"crop": (0.5, 0.1)}, "crop of AugMix"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            AugMix(**options)
    with pytest.raises(InputError, match=r"AugMix takes images.*\[4, 7\]"):
        AugMix()(torch.rand(4, 7))
