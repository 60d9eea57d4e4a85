"""Ice for the frost corruption, drawn: panes covered with fern-like feathers and needles.

The benchmark mixes in photographs of frosted glass, which cannot be shipped. These five textures stand in for them:
periodic, made once a process, always the same. What makes frost hard or easy for a network is not its shapes but how much
it varies inside a crop and from pane to pane, so each pane has the colour, contrast and fineness of such a photograph.
"""

import math
import random
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

__all__ = ["ice_textures"]

_SIDE = 640  # of the full texture; a multiple of the shrink


class Pane(NamedTuple):
    """Each pane is calm (its spread is small) and they differ: which one a crop shows makes most of its colour."""

    colour: tuple[float, float, float]  # mean; ice is bluish
    spread: float  # standard deviation of the light that the crystals make
    slope: float  # their amplitudes fall as frequency ** -slope: the lower, the more it glitters
    feathers: int
    length: float
    stars: int = 0
    reach: float = 0.0


_PANES = (
    Pane((0.31, 0.58, 0.65), 0.055, 0.85, feathers=200, length=160),  # thick ice before the sky
    Pane((0.78, 0.80, 0.83), 0.070, 0.85, feathers=400, length=120),  # white, in daylight
    Pane((0.78, 0.80, 0.83), 0.070, 0.85, feathers=200, length=160, stars=150, reach=60),
    Pane((0.56, 0.62, 0.67), 0.105, 0.75, feathers=0, length=0, stars=500, reach=60),  # needles
    Pane((0.42, 0.46, 0.51), 0.140, 0.85, feathers=300, length=150),  # before a dark room
)
_UNEVEN = 0.04  # standard deviation of the slow change of light across a pane
_GROUND = 128  # what no crystal covers
_LIGHT = (64, 255)  # of a crystal: some throw the light back, some away
_STEPS = (9.0, 7.0, 5.0)  # between the branches of a stem, its branches, their branches

Stroke = tuple[float, float, float, float, int, int]  # from, to, width, light


@lru_cache(maxsize=8)
def ice_textures(shrink: int, device: torch.device) -> Tensor:
    """float32 [5, 3, S, S] in [0, 1], S = 640 / shrink, periodic in both directions.

    Shrunk by taking one pixel of each cell, the middle one: the benchmark's bilinear resize to a fifth comes to that.
    """
    full = torch.from_numpy(_full_textures())
    return full[..., shrink // 2 :: shrink, shrink // 2 :: shrink].contiguous().to(device)


@lru_cache(maxsize=1)
def _full_textures() -> NDArray[np.float32]:
    out = np.empty((len(_PANES), 3, _SIDE, _SIDE), dtype=np.float32)
    for i, pane in enumerate(_PANES):
        shade = 1.0 - _drawing(random.Random(1000 + i), pane) / (1.0 - sum(pane.colour) / 3)  # mean 1
        for channel, mean in enumerate(pane.colour):  # the brighter, the whiter
            out[i, channel] = (1.0 - shade * (1.0 - mean)).clip(0.0, 1.0)
    return out


def _drawing(draw: random.Random, pane: Pane) -> NDArray[np.float64]:
    """The light on a pane, mean 0: crystals with the pane's contrast and fineness, unevenly lit."""
    strokes: list[Stroke] = []
    for count, length, arms in ((pane.feathers, pane.length, 1), (pane.stars, pane.reach, 6)):
        for _ in range(count):
            x, y, turn = (top * draw.random() for top in (_SIDE, _SIDE, math.tau))
            light = draw.randint(*_LIGHT)
            for k in range(arms):
                angle = turn + k * math.tau / arms + draw.gauss(0, 0.05)
                _feather(draw, strokes, x, y, angle, length * draw.uniform(0.6, 1.2), 0 if arms == 1 else 1, light)
    noise = np.frombuffer(draw.randbytes(_SIDE * _SIDE), dtype=np.uint8).reshape(_SIDE, _SIDE)
    return pane.spread * _sloped(_render(strokes), pane.slope) + _UNEVEN * _sloped(noise, 2.0)


def _sloped(levels: NDArray[np.uint8], slope: float) -> NDArray[np.float64]:
    """The picture with its amplitudes, octave by octave, falling as frequency ** -slope; mean 0, spread 1.

    Phases stay, and with them the shapes.
    """
    spectrum = np.fft.rfft2(levels - levels.mean())
    frequency = np.hypot(np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)) * _SIDE
    frequency[0, 0] = 1.0
    octave = np.log2(frequency).astype(np.int64)
    power = np.bincount(octave.ravel(), np.square(np.abs(spectrum)).ravel()) / np.bincount(octave.ravel())
    field = np.fft.irfft2(spectrum / np.sqrt(power[octave]) * frequency**-slope, s=levels.shape)
    return np.asarray(field / field.std())


def _feather(
    draw: random.Random, strokes: list[Stroke], x: float, y: float, angle: float, length: float, order: int, light: int
) -> None:
    """A gently bent stem with branches on both sides that shorten towards the tip, and so on, twice."""
    step = _STEPS[order]
    bend = draw.gauss(0, 0.03)
    nodes = max(1, int(length / step))
    for i in range(nodes):
        left = 1.0 - i / nodes
        to_x, to_y = x + step * math.cos(angle), y + step * math.sin(angle)
        strokes.append((x, y, to_x, to_y, max(1, round((3, 2, 1)[order] * left)), light))
        x, y, angle = to_x, to_y, angle + bend
        if order < 2 and i > 0:
            for side in (-1, 1):
                branch = length * (0.42, 0.3)[order] * left * draw.uniform(0.3, 1.2)
                if branch >= _STEPS[order + 1] / 2:
                    _feather(draw, strokes, x, y, angle + side * draw.gauss(0.7, 0.15), branch, order + 1, light)


def _render(strokes: list[Stroke]) -> NDArray[np.uint8]:
    """The strokes on a torus, later ones on top."""
    canvas = Image.new("L", (_SIDE, _SIDE), _GROUND)
    pen = ImageDraw.Draw(canvas)
    for x, y, to_x, to_y, width, light in strokes:
        dx, dy = -math.floor(x / _SIDE) * _SIDE, -math.floor(y / _SIDE) * _SIDE
        x, to_x, y, to_y = x + dx, to_x + dx, y + dy, to_y + dy
        for across in (0, -_SIDE, _SIDE) if not 12 < x < _SIDE - 12 else (0,):
            for down in (0, -_SIDE, _SIDE) if not 12 < y < _SIDE - 12 else (0,):
                pen.line((x + across, y + down, to_x + across, to_y + down), fill=light, width=width)
    return np.asarray(canvas)
