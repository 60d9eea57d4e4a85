"""JPEG compression: Pillow's codec image by image, and the same arithmetic for a whole batch in torch.

The batched version does what libjpeg does by default between pixels and quantised coefficients and back (the entropy
coding in between loses nothing): fixed-point colour conversion, 2 x 2 chroma averaging, the accurate integer DCT, the
quality-scaled tables of the standard's annex K, and triangle ("fancy") chroma upsampling. The integer DCT is a matrix
product followed by a rounding shift, twice; all its sums are whole numbers below 2^53 and therefore exact in float64.
"""

import io
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from petal.corruptions.random import KeyedRandom

__all__ = ["Codec", "jpeg_compression", "jpeg_pillow", "jpeg_torch", "quantisation_tables"]

Codec = Literal["auto", "pillow", "torch"]

# The DCT of eight samples in units of 2^-13 (and sqrt 8 too large); not quite symmetric, since libjpeg rounds products.
_DCT = (
    (8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363),
    (10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703),
    (9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633),
    (8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437),
    (4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433),
    (2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260),
)
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)


def jpeg_compression(x: Tensor, c: int, rng: KeyedRandom, codec: Codec = "auto") -> Tensor:
    """The picture after JPEG of quality c. "auto" is "torch": equal to Pillow's to the last bit and several times faster."""
    return jpeg_pillow(x, c) if codec == "pillow" else jpeg_torch(x, c)


def jpeg_pillow(x: Tensor, quality: int) -> Tensor:
    """The reference: Pillow encodes and decodes each image in memory, with its default settings."""
    levels = x.detach().mul(255.0).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    out = np.empty_like(levels)
    for i, image in enumerate(levels):
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            out[i] = np.asarray(Image.open(file))
    return torch.from_numpy(out).to(x.device).permute(0, 3, 1, 2).to(x.dtype).div_(255.0)


def jpeg_torch(x: Tensor, quality: int) -> Tensor:
    """The same for the whole batch at once."""
    height, width = x.shape[-2:]
    red, green, blue = x.mul(255.0).round_().int().unbind(1)
    luma_table, chroma_table = (table.to(x.device) for table in quantisation_tables(quality))

    luma = (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16
    colour = torch.stack(
        (
            -11059 * red - 21709 * green + 32768 * blue,
            32768 * red - 27439 * green - 5329 * blue,
        ),
        dim=1,
    )
    colour = (colour + ((128 << 16) + (1 << 15) - 1)) >> 16

    luma = _through_dct(_pad_to(luma, 8), luma_table)[..., :height, :width]
    colour = _through_dct(_pad_to(_halve(colour), 8), chroma_table)
    colour = _double(colour[..., : (height + 1) // 2, : (width + 1) // 2])[..., :height, :width]

    cb, cr = (colour - 128).unbind(1)
    half = 1 << 15
    red = luma + ((91881 * cr + half) >> 16)
    green = luma + ((-22554 * cb - 46802 * cr + half) >> 16)
    blue = luma + ((116130 * cb + half) >> 16)
    return torch.stack((red, green, blue), dim=1).clamp_(0, 255).to(x.dtype).div_(255.0)


def quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """The luma and chroma divisors [8, 8] of a quality in 1..100, scaled as the Independent JPEG Group does."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    luma, chroma = (
        ((torch.tensor(base) * scale + 50) // 100).clamp_(1, 255).double() for base in (_LUMA, _CHROMA)
    )
    return luma, chroma


def _pad_to(planes: Tensor, multiple: int) -> Tensor:
    """Repeat the last row and column until both sides are multiples."""
    height, width = planes.shape[-2:]
    bottom, right = -height % multiple, -width % multiple
    if bottom:
        planes = torch.cat((planes, planes[..., -1:, :].expand(*planes.shape[:-2], bottom, width)), dim=-2)
    if right:
        planes = torch.cat((planes, planes[..., -1:].expand(*planes.shape[:-1], right)), dim=-1)
    return planes


def _halve(planes: Tensor) -> Tensor:
    """Means of 2 x 2; the rounding goes down and up in turn along the columns."""
    height, width = planes.shape[-2:]
    right = -width % 16  # the encoder widens to whole blocks before it averages
    if right:
        planes = torch.cat((planes, planes[..., -1:].expand(*planes.shape[:-1], right)), dim=-1)
    if height % 2:
        planes = torch.cat((planes, planes[..., -1:, :]), dim=-2)
    total = planes[..., 0::2, 0::2] + planes[..., 0::2, 1::2] + planes[..., 1::2, 0::2] + planes[..., 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[-1], device=planes.device, dtype=torch.int32) % 2
    return (total + bias) >> 2


def _double(planes: Tensor) -> Tensor:
    """Twice as high and wide: each new sample is 3/4 the nearest old one and 1/4 the next, along both sides."""
    above = torch.cat((planes[..., :1, :], planes[..., :-1, :]), dim=-2)
    below = torch.cat((planes[..., 1:, :], planes[..., -1:, :]), dim=-2)
    tall = torch.stack((3 * planes + above, 3 * planes + below), dim=-2).flatten(-3, -2)
    left = torch.cat((tall[..., :1], tall[..., :-1]), dim=-1)
    right = torch.cat((tall[..., 1:], tall[..., -1:]), dim=-1)
    return torch.stack(((3 * tall + left + 8) >> 4, (3 * tall + right + 7) >> 4), dim=-1).flatten(-2)


def _through_dct(planes: Tensor, table: Tensor) -> Tensor:
    """Levels 0..255 [..., H, W], both sides multiples of 8, through DCT, quantisation and inverse DCT."""
    forward, backward = _dct_matrices(planes.device)
    height, width = planes.shape[-2:]
    divisor = table.mT.repeat(width // 8, height // 8)  # the coefficients lie with rows and columns exchanged
    lines = _scaled_product((planes - 128).double(), forward, 11)
    coefficients = _scaled_product(lines.mT, forward, 15)  # 8 times the coefficient
    size = (coefficients.abs().add_(4 * divisor)).div_(8 * divisor).floor_()
    quantised = size.mul_(coefficients.sign_()).mul_(divisor)
    lines = _scaled_product(quantised, backward, 11)
    return _scaled_product(lines.mT, backward, 18).add_(128).clamp_(0, 255).int()


def _scaled_product(planes: Tensor, matrix: Tensor, shift: int) -> Tensor:
    """Every eight neighbours of a line times the matrix, divided by 2^shift and rounded (halves up)."""
    unit = 2.0**shift
    return (planes.reshape(-1, 8) @ matrix).add_(unit / 2).div_(unit).floor_().view(planes.shape)


@lru_cache(maxsize=8)
def _dct_matrices(device: torch.device) -> tuple[Tensor, Tensor]:
    """For lines as rows: forward and inverse."""
    dct = torch.tensor(_DCT, dtype=torch.float64, device=device)
    return dct.mT.contiguous(), dct
