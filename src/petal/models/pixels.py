"""Do the pixels fit the network? Wrongly scaled input is the most common silent mistake in this field.

Nothing crashes when images in 0..255, or images normalised twice, or not at all, go into a network: the error rate is
bad, and adapting at test time hides part of it. The check looks at the range of a batch only, which no corruption of an
image in [0, 1] changes, however dark, bright or flat it becomes.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from petal.errors import PetalWarning
from petal.models.normalize import find_normalize


class PixelStatistics(NamedTuple):
    """Mean and standard deviation, over all channels, of the pixels a network was trained on."""

    mean: float
    std: float


UNIT_PIXELS = PixelStatistics(0.45, 0.25)  #: photographs in [0, 1]
NORMALIZED_PIXELS = PixelStatistics(0.0, 1.0)  #: after `(x - mean) / std`
BYTE_PIXELS = PixelStatistics(115.0, 64.0)  #: photographs in 0..255

_SLACK = 0.1  # resampling overshoots [0, 1] a little
_FIRST_NORMALIZED = ("torchvision.models", "timm.models")  # plain networks of these expect normalised input


def expected_input(model: nn.Module) -> PixelStatistics:
    """What pixels a network expects, as (mean, std).

    All networks of `petal.models.build` expect [0, 1] (they normalise by themselves), unless built with `mean=None`
    where the default is to normalise. Plain torchvision and timm networks expect normalised pixels. Any other network
    is taken to expect [0, 1], as all of petal's images are; set `model.pixels = petal.models.NORMALIZED_PIXELS` to
    differ.

    >>> expected_input(nn.Conv2d(3, 8, 3))
    PixelStatistics(mean=0.45, std=0.25)
    """
    for wrapper in ("_orig_mod", "module"):  # torch.compile, DataParallel
        inner = model._modules.get(wrapper)
        if inner is not None and len(model._modules) == 1:
            return expected_input(inner)
    stated = getattr(model, "pixels", None)
    if isinstance(stated, tuple) and len(stated) == 2:
        return PixelStatistics(float(stated[0]), float(stated[1]))
    if find_normalize(model) is None and type(model).__module__.startswith(_FIRST_NORMALIZED):
        return NORMALIZED_PIXELS
    return UNIT_PIXELS


def input_problem(expected: nn.Module | tuple[float, float], x: Tensor) -> str | None:
    """What is wrong with the pixels of a batch for this network (or these expected statistics), or None."""
    mean, std = expected_input(expected) if isinstance(expected, nn.Module) else expected
    if not x.is_floating_point():
        return f"the images are {x.dtype}: the network takes floating point; use x.float() / 255"
    if x.numel() == 0:
        return None
    low, high = (float(value) for value in torch.aminmax(x.detach()))
    span = f"pixels between {low:.3g} and {high:.3g}"
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        return f"{span}: some are not finite"
    if mean > 3 or std > 3:
        if low >= -_SLACK and high <= 1 + _SLACK:
            return f"{span}, where the network expects 0..255; multiply by 255"
        return None
    if high > 20 or (high > 4 and low >= -_SLACK):
        return f"{span} look like 0..255; divide by 255"
    if std > 0.5:
        # Flat, bright, normalised images can lie inside [0, 1] as well, but then they hardly vary.
        if low >= 0 and high <= 1 and float(x.detach().float().std((-2, -1), correction=0).mean()) > 0.1:
            return (
                f"{span}, where the network expects normalised input; use (x - mean) / std, or build the network with "
                "petal.models.build, which makes the normalisation a part of it"
            )
        return None
    if low < -_SLACK:
        return (
            f"{span} look normalised already, where the network expects [0, 1] and normalises by itself if it needs "
            "to; leave (x - mean) / std out"
        )
    if high > 1 + _SLACK:
        return f"{span}, where the network expects [0, 1]; are they normalised already, or not clipped?"
    if 0 < high <= 1.01 / 255:
        return f"{span}: nearly black; were they divided by 255 twice?"
    return None


def check_input(expected: nn.Module | tuple[float, float], x: Tensor) -> bool:
    """Warn (`PetalWarning`) when the pixels of a batch do not fit the network; True when they do.

    `expected` is the network, or (mean, std) of the pixels it expects. It reads the batch's range, so on a GPU it waits
    for the device: once per stream is enough.

    >>> check_input(UNIT_PIXELS, torch.rand(4, 3, 8, 8))
    True
    """
    problem = input_problem(expected, x)
    if problem is not None:
        warnings.warn(problem, PetalWarning, stacklevel=2)
    return problem is None
