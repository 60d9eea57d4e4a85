"""Corruptions of colour, geometry and resolution."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from petal.corruptions import linear
from petal.corruptions.random import KeyedRandom

__all__ = ["box_matrix", "brightness", "contrast", "elastic_transform", "pixelate", "saturate"]

_BOX_BITS = 22  # fixed point of the box resize


def brightness(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """V of HSV plus c. With hue and saturation kept, all three channels grow by the factor V grows by."""
    value = x.amax(dim=1, keepdim=True)
    raised = (value + c).clamp_(max=1.0)
    return torch.where(value > 0, x * (raised / value.clamp(min=1e-12)), raised)


def saturate(x: Tensor, c: tuple[float, float], rng: KeyedRandom) -> Tensor:
    """S of HSV times a plus b. A channel lies at V (1 - S w), where w in [0, 1] depends on the hue only and stays."""
    a, b = c
    value = x.amax(dim=1, keepdim=True)
    spread = value - x.amin(dim=1, keepdim=True)
    saturation = spread / value.clamp(min=1e-12)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).view(3, 1, 1)  # grey has hue 0, which is red
    weight = torch.where(spread > 0, (value - x) / spread.clamp(min=1e-12), red)
    return value * (1.0 - (saturation * a + b).clamp_(0.0, 1.0) * weight)


def contrast(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """(x - mean) c + mean, with one mean per image and channel."""
    mean = x.double().mean(dim=(2, 3), keepdim=True).to(x.dtype)
    return (x - mean).mul_(c).add_(mean)


def pixelate(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """Box resize of the 8-bit picture to int(side * c) and back."""
    height, width = x.shape[-2:]
    small = _box_resize(x.mul(255.0).round_().double(), int(height * c), int(width * c))
    return _box_resize(small, height, width).div_(255.0).to(x.dtype)


def _box_resize(levels: Tensor, height: int, width: int) -> Tensor:
    """Columns first, then rows, each in fixed point and rounded to whole levels, as Pillow resizes."""
    unit = 2.0**_BOX_BITS
    columns = box_matrix(levels.shape[-1], width, levels.device)
    levels = (levels @ columns.mT).add_(unit / 2).div_(unit).floor_()
    rows = box_matrix(levels.shape[-2], height, levels.device)
    return (levels.mT @ rows.mT).add_(unit / 2).div_(unit).floor_().mT.contiguous()


@lru_cache(maxsize=64)
def box_matrix(size: int, to: int, device: torch.device) -> Tensor:
    """float64 [to, size]: weights of the box resize in units of 2^-22; a pixel belongs to a box wholly or not at all."""
    scale = size / to
    support = max(scale, 1.0) / 2
    matrix = torch.zeros(to, size, dtype=torch.float64)
    for i in range(to):
        centre = (i + 0.5) * scale
        first, last = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), size)
        inside = [j for j in range(first, last) if -0.5 < (j - centre + 0.5) / max(scale, 1.0) <= 0.5]
        matrix[i, inside] = float(int(0.5 + 2**_BOX_BITS / len(inside)))
    return matrix.to(device)


def elastic_transform(x: Tensor, c: tuple[float, float, float, float], rng: KeyedRandom) -> Tensor:
    """A random affine map, then a smooth random displacement; bilinear both."""
    strength, sigma, jitter, unit = c
    height, width = x.shape[-2:]
    side = min(height, width) * unit
    column = torch.arange(width, device=x.device, dtype=torch.float64)
    row = torch.arange(height, device=x.device, dtype=torch.float64)[:, None]

    inverse = _affine_inverse(rng.uniform((3, 2), -jitter * side, jitter * side).double(), height, width)
    (xx, xy, x0), (yx, yy, y0) = ([w[:, None, None] for w in line] for line in inverse)
    moved = _sample(x, xx * column + xy * row + x0, yx * column + yy * row + y0, mirror_edge=False)
    if strength == 0:
        return moved
    field = linear.blur(rng.uniform((2, height, width), -1.0, 1.0), sigma * side, truncate=3.0, border="reflect")
    field = field.double().mul_(strength * side)
    return _sample(moved, column + field[:, 0], row + field[:, 1], mirror_edge=True)


def _affine_inverse(moves: Tensor, height: int, width: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The map that takes each moved point back: its rows (xx, xy, x0), (yx, yy, y0), each one number per image.

    moves [N, 3, 2] are the displacements (columns, rows) of (cx+s, cy+s), (cx+s, cy-s), (cx-s, cy-s).
    """
    cx, cy, s = width // 2, height // 2, min(height, width) // 3
    first, second, third = moves.unbind(1)
    by_row = (first - second) / (2 * s)  # a step of one row moves by this more
    by_column = (second - third) / (2 * s)
    xx, yx = 1.0 + by_column[:, 0], by_column[:, 1]  # the forward map
    xy, yy = by_row[:, 0], 1.0 + by_row[:, 1]
    x0 = cx + s + second[:, 0] - xx * (cx + s) - xy * (cy - s)
    y0 = cy - s + second[:, 1] - yx * (cx + s) - yy * (cy - s)
    det = xx * yy - xy * yx
    return (
        (yy / det, -xy / det, (xy * y0 - yy * x0) / det),
        (-yx / det, xx / det, (yx * x0 - xx * y0) / det),
    )


def _sample(x: Tensor, column: Tensor, row: Tensor, *, mirror_edge: bool) -> Tensor:
    """Bilinear values at (row, column), float64 [N, H, W]; beyond the edge the picture is mirrored, the last pixel
    doubled (mirror_edge) or not."""
    height, width = x.shape[-2:]
    if mirror_edge:
        grid = torch.stack(((2 * column + 1) / width - 1, (2 * row + 1) / height - 1), dim=-1)
    else:
        grid = torch.stack((2 * column / (width - 1) - 1, 2 * row / (height - 1) - 1), dim=-1)
    return F.grid_sample(x, grid.to(x.dtype), "bilinear", "reflection", align_corners=not mirror_edge)
