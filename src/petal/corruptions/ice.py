"""Ice for the frost corruption, drawn: fern-like feathers and needles on a mottled pane.

The benchmark mixes in photographs of frosted glass, which cannot be shipped. These five textures stand in for them:
periodic, made once a process, always the same. Their mean, contrast and fineness are set so that the corrupted CIFAR
images have the statistics of those made with the photographs.
"""

import math
import random
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ice_textures"]

_SIDE = 640  # of the full texture; a multiple of the shrink
_MEAN, _SPREAD = 0.638, 0.208  # of the textures shrunk to a fifth
_TINT = (-0.035, 0.0, 0.03)  # ice is bluish
# of each texture: feathers, their length, needle stars, their length, weight of the mottling
_PANES = ((44, 200, 0, 0, 0.5), (22, 300, 30, 60, 0.4), (90, 120, 0, 0, 0.7), (0, 0, 60, 110, 0.5), (30, 230, 50, 50, 0.9))

_STEPS = (13.0, 11.0, 9.0)  # between the branches of a stem, its branches, their branches

Stroke = tuple[float, float, float, float, int, int]  # from, to, width, light


@lru_cache(maxsize=8)
def ice_textures(shrink: int, device: torch.device) -> Tensor:
    """float32 [5, 3, S, S] in [0, 1], S = 640 / shrink, periodic in both directions."""
    full = torch.from_numpy(_full_textures())
    return F.avg_pool2d(full, shrink).contiguous().to(device)


@lru_cache(maxsize=1)
def _full_textures() -> NDArray[np.float32]:
    out = np.empty((len(_PANES), 3, _SIDE, _SIDE), dtype=np.float32)
    for i, pane in enumerate(_PANES):
        grey = _settle(_pane(random.Random(1000 + i), *pane))
        for channel, tint in enumerate(_TINT):
            out[i, channel] = (grey + tint * (1.0 - grey) * 2.0).clip(0.0, 1.0)
    return out


def _settle(raw: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bring mean and contrast, measured at a fifth of the size, to what they should be; values are clipped to [0, 1]."""
    grey = raw
    for _ in range(6):
        small = grey.reshape(_SIDE // 5, 5, _SIDE // 5, 5).mean(axis=(1, 3))
        grey = ((grey - small.mean()) * (_SPREAD / small.std()) + _MEAN).clip(0.0, 1.0)
    return grey


def _pane(draw: random.Random, feathers: int, length: float, stars: int, reach: float, mottle: float) -> NDArray[np.float64]:
    strokes: list[Stroke] = []
    for x, y in _places(draw, feathers):
        _feather(draw, strokes, x, y, draw.uniform(0, 2 * math.pi), length * draw.uniform(0.6, 1.2), 0)
    for x, y in _places(draw, stars):
        turn = draw.uniform(0, math.pi)
        for k in range(draw.choice((6, 6, 12))):
            _feather(draw, strokes, x, y, turn + k * math.pi / 3 + draw.gauss(0, 0.05), reach * draw.uniform(0.5, 1.2), 1)
    crystals = _render(strokes)
    glow = np.asarray(_periodic_blur(crystals, 9.0), dtype=np.float64)
    lines = np.asarray(crystals, dtype=np.float64)
    coarse, fine = _clouds(draw, 2.2), _clouds(draw, 0.9)
    return np.asarray(0.6 * lines / 255 + 0.4 * glow / 255 + 0.07 * coarse + 0.1 * mottle * fine)


def _places(draw: random.Random, count: int) -> list[tuple[float, float]]:
    """Points spread over the pane: each the farthest of eight tries from those before it."""
    places: list[tuple[float, float]] = []

    def room(x: float, y: float) -> float:
        half = _SIDE / 2
        return min((math.hypot(abs(abs(x - u) - half) - half, abs(abs(y - v) - half) - half) for u, v in places), default=0)

    for _ in range(count):
        tries = [(draw.uniform(0, _SIDE), draw.uniform(0, _SIDE)) for _ in range(8)]
        places.append(max(tries, key=lambda place: room(*place)))
    return places


def _feather(
    draw: random.Random, strokes: list[Stroke], x: float, y: float, angle: float, length: float, order: int
) -> None:
    """A gently bent stem with branches on both sides that shorten towards the tip, and so on, twice."""
    step = _STEPS[order]
    bend = draw.gauss(0, 0.012)
    nodes = max(1, int(length / step))
    for i in range(nodes):
        left = 1.0 - i / nodes
        to_x, to_y = x + step * math.cos(angle), y + step * math.sin(angle)
        light = int((255, 215, 170)[order] * (0.55 + 0.45 * left))
        strokes.append((x, y, to_x, to_y, max(1, round((5, 4, 2)[order] * left)), light))
        x, y, angle = to_x, to_y, angle + bend
        if order < 2 and i > 0:
            for side in (-1, 1):
                branch = length * (0.42, 0.3)[order] * left * draw.uniform(0.5, 1.1)
                if branch >= _STEPS[order + 1] / 2:
                    _feather(draw, strokes, x, y, angle + side * draw.gauss(0.95, 0.08), branch, order + 1)


def _render(strokes: list[Stroke]) -> Image.Image:
    """The strokes on a torus, the brightest on top."""
    canvas = Image.new("L", (_SIDE, _SIDE))
    pen = ImageDraw.Draw(canvas)
    for x, y, to_x, to_y, width, light in sorted(strokes, key=lambda stroke: stroke[-1]):
        dx, dy = -math.floor(x / _SIDE) * _SIDE, -math.floor(y / _SIDE) * _SIDE
        x, to_x, y, to_y = x + dx, to_x + dx, y + dy, to_y + dy
        for across in (0, -_SIDE, _SIDE) if not 12 < x < _SIDE - 12 else (0,):
            for down in (0, -_SIDE, _SIDE) if not 12 < y < _SIDE - 12 else (0,):
                pen.line((x + across, y + down, to_x + across, to_y + down), fill=light, width=width)
    return _periodic_blur(canvas, 0.7)


def _periodic_blur(image: Image.Image, sigma: float) -> Image.Image:
    margin = int(4 * sigma) + 1
    tiled = np.pad(np.asarray(image), margin, mode="wrap")
    blurred = Image.fromarray(tiled).filter(ImageFilter.GaussianBlur(sigma))
    return blurred.crop((margin, margin, margin + _SIDE, margin + _SIDE))


def _clouds(draw: random.Random, slope: float) -> NDArray[np.float64]:
    """A periodic random field, its spectrum falling as frequency ** -slope; mean 0, spread 1."""
    noise = np.array([draw.random() for _ in range(_SIDE * _SIDE // 16)]).reshape(_SIDE // 4, _SIDE // 4)
    row, column = np.fft.fftfreq(_SIDE // 4)[:, None], np.fft.rfftfreq(_SIDE // 4)
    frequency = np.hypot(row, column)
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(noise) * frequency**-slope, s=noise.shape)
    wide = field.repeat(4, axis=0).repeat(4, axis=1)
    wide = (wide + np.roll(wide, 2, 0) + np.roll(wide, 2, 1) + np.roll(wide, (2, 2), (0, 1))) / 4
    return np.asarray((wide - wide.mean()) / wide.std())
