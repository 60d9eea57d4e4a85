"""Blurs."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from petal.corruptions import linear
from petal.corruptions.random import KeyedRandom

__all__ = [
    "copy_map",
    "defocus_blur",
    "disk_kernel",
    "gaussian_blur",
    "glass_blur",
    "motion_blur",
    "motion_filter",
    "zoom",
    "zoom_blur",
]


def gaussian_blur(x: Tensor, c: float, rng: KeyedRandom) -> Tensor:
    """Gaussian blur of sigma c."""
    return linear.blur(x, c)


def defocus_blur(x: Tensor, c: tuple[float, float], rng: KeyedRandom) -> Tensor:
    """Filter with a disk, its edge smoothed; the border mirrors without repeating the last pixel."""
    taps = disk_kernel(*c)
    reach = max(max(abs(dy), abs(dx)) for dy, dx, _ in taps)
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    height, width = x.shape[-2:]
    out = torch.zeros_like(x)
    for dy, dx, weight in taps:
        out.add_(padded[..., reach + dy : reach + dy + height, reach + dx : reach + dx + width], alpha=weight)
    return out


@lru_cache(maxsize=32)
def disk_kernel(radius: float, smoothing: float) -> tuple[tuple[int, int, float], ...]:
    """The taps (dy, dx, weight) of a disk smoothed by a small Gaussian; those that are zero in float32 are left out."""
    half, reach = (8, 1) if radius <= 8 else (int(radius), 2)
    grid = np.arange(-half, half + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(np.float64)
    disk /= disk.sum()
    small = np.exp(-0.5 * (np.arange(-reach, reach + 1) / smoothing) ** 2)
    small /= small.sum()
    padded = np.pad(disk, reach, mode="reflect")
    size = len(grid)
    down = sum(w * padded[i : i + size] for i, w in enumerate(small))
    kernel = sum(w * down[:, i : i + size] for i, w in enumerate(small))
    places = np.argwhere(kernel > 1e-10)
    return tuple((int(i) - half, int(j) - half, float(kernel[i, j])) for i, j in places)


def glass_blur(x: Tensor, c: tuple[float, int, int], rng: KeyedRandom) -> Tensor:
    """Blur, truncate to 8 bits, let pixels take the values of near ones in `passes` passes, and blur again."""
    sigma, distance, passes = c
    channels, height, width = x.shape[1:]
    levels = linear.blur(x, sigma).mul(255.0).floor_().div_(255.0)
    source: Tensor | None = None
    for _ in range(passes):
        moved = rng.integers((2, height - 2 * distance, width - 2 * distance), -distance, distance)
        step = copy_map(moved, distance, height, width)
        source = step if source is None else source.gather(1, step)  # the later pass reads what the earlier one wrote
    if source is not None:
        levels = levels.flatten(2).gather(2, source[:, None].expand(-1, channels, -1)).view_as(x)
    return linear.blur(levels, sigma)


def copy_map(displacement: Tensor, distance: int, height: int, width: int) -> Tensor:
    """Where each pixel's value comes from after one pass of sequential copies: flat indices, int64 [N, H * W].

    The pass runs over rows height-distance .. distance+1 and columns likewise, from the bottom right to the top left, and
    overwrites pixel p by pixel q = p + displacement; displacement is int64 [N, 2 (rows, columns), H - 2d, W - 2d], its
    first row for the row distance+1. If q was overwritten before (it lies in the region and comes later in the order of
    reading), p gets what q got; else q's old value. So q points on, or ends the chain: all chains are followed at once
    by doubling (who points to a pointer, points to where that one points), exactly as the loop would.
    """
    n = displacement.shape[0]
    device = displacement.device
    pixels = height * width
    row = torch.arange(distance + 1, height - distance + 1, device=device)[:, None]
    column = torch.arange(distance + 1, width - distance + 1, device=device)
    q_row, q_column = row + displacement[:, 0], column + displacement[:, 1]
    p, q = row * width + column, q_row * width + q_column

    source = torch.arange(pixels, device=device).expand(n, -1).clone()
    region = p.flatten().expand(n, -1)
    if distance == 1:  # displacements are -1 and 0 then: never to a pixel that comes later
        return source.scatter_(1, region, q.flatten(1))
    inside = (q_row > distance) & (q_row <= height - distance) & (q_column > distance) & (q_column <= width - distance)
    final = torch.where(inside & (q > p), q, q + pixels)  # below `pixels`: go on there; above: the old value, stop
    source += pixels
    source.scatter_(1, region, final.flatten(1))
    for _ in range(math.ceil(math.log2(p.numel())) if p.numel() > 1 else 0):
        source = torch.where(source < pixels, source.gather(1, source % pixels), source)
    return source.sub_(pixels)


def motion_blur(x: Tensor, c: tuple[int, float], rng: KeyedRandom) -> Tensor:
    """Motion blur in a direction uniform in -45..45 degrees."""
    return motion_filter(x, *c, rng.uniform((), -45.0, 45.0))


def motion_filter(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """One-sided motion blur: 2 radius + 1 taps of half-Gaussian weight along the direction, each at a whole pixel.

    Tap i lies at ceil(i cos - 1/2) columns and ceil(i sin - 1/2) rows; pixels beyond the edge repeat the last one.
    angle is in degrees, one per image. Taps too light to count in float32 are left out.
    """
    height, width = x.shape[-2:]
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (taps / sigma) ** 2)
    weights /= weights.sum()
    turn = torch.deg2rad(angle.double())[:, None]
    steps = torch.arange(len(taps), device=x.device)
    right = torch.ceil(steps * turn.cos() - 0.5).long()
    down = torch.ceil(steps * turn.sin() - 0.5).long()
    column = torch.arange(width, device=x.device)
    row = torch.arange(height, device=x.device)
    flat = x.flatten(2)
    out = flat * float(weights[0])
    for i in range(1, len(taps)):
        if weights[i] < 1e-9:
            break
        rows = (row + down[:, i, None]).clamp_(0, height - 1).mul_(width)
        columns = (column + right[:, i, None]).clamp_(0, width - 1)
        index = (rows[:, :, None] + columns[:, None, :]).flatten(1)
        out.add_(flat.gather(2, index[:, None].expand_as(flat)), alpha=float(weights[i]))
    return out.view_as(x)


def zoom_blur(x: Tensor, c: tuple[int, float], rng: KeyedRandom) -> Tensor:
    """Mean of the picture and its centre zooms by 1, 1 + step, ...; the picture itself counts twice."""
    height, width = x.shape[-2:]
    if height * width > _DENSE_PIXELS:
        return _zoom_mean(x, *c)
    return (x.double().flatten(2) @ _zoom_matrix(*c, height, width, x.device)).to(x.dtype).view_as(x)


_DENSE_PIXELS = 48 * 48  # up to here all zooms together are quicker as one matrix on the pixels


@lru_cache(maxsize=8)
def _zoom_matrix(count: int, step: float, height: int, width: int, device: torch.device) -> Tensor:
    """float64 [H * W, H * W]: what becomes of a picture with a single white pixel, for each pixel."""
    single = torch.eye(height * width, device=device).view(-1, 1, height, width)
    return _zoom_mean(single, count, step).double().flatten(1)


def _zoom_mean(x: Tensor, count: int, step: float) -> Tensor:
    total = x + x
    for factor in np.arange(1.0, 1.0 + (count - 0.5) * step, step)[1:]:
        total += zoom(x, float(factor))
    return total.div_(count + 1)


def zoom(x: Tensor, factor: float) -> Tensor:
    """The middle ceil(side / factor) pixels, stretched bilinearly, end to end, to round(that * factor) and trimmed."""
    (top, tall, high, skip), (left, wide, broad, pass_by) = (_zoom_extent(side, factor) for side in x.shape[-2:])
    middle = x[..., top : top + tall, left : left + wide]
    stretched = F.interpolate(middle, size=(high, broad), mode="bilinear", align_corners=True)
    return stretched[..., skip : skip + x.shape[-2], pass_by : pass_by + x.shape[-1]]


def _zoom_extent(side: int, factor: float) -> tuple[int, int, int, int]:
    """Start and length of the crop, length after stretching, what is trimmed before it."""
    crop = math.ceil(side / factor)
    stretched = round(crop * factor)
    return (side - crop) // 2, crop, stretched, (stretched - side) // 2
