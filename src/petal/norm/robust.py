"""Batch statistics of bounded influence: no few images of a batch can say how all of it is normalised.

The mean over a batch is as far off as its worst image likes. Here every image has statistics of its own, and what is made of
them per channel is not: their median (after MedBN, Park et al., CVPR 2024), or the mean after each is brought nearer to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import ConfigError
from petal.norm.layers import replaced

STATISTICS = ("batch", "median", "clipped", "screened")
ODD = 2.0               # times the usual distance from the others, an image does not count ("screened")
FAR = 10.0              # median deviations beyond which a channel tells no more


class BoundedNorm(_BatchNorm):
    """Batch norm by the statistics of the batch's images, of each of which the influence is bounded.

        median      the median over images of their means, and of their mean squared distances from it
        clipped     the mean over images, of statistics no further than `reach` median deviations from the median
        screened    "median" of those images whose statistics are, over all channels, about as far from the median as others'

    An image is one voice, whatever its size. With `straight` the gradient is that of the plain mean, which tells an attacker
    more than that of a median. A layer that has running statistics works by these, as torch's does.
    """

    def __init__(self, layer: _BatchNorm, kind: str = "median", reach: float = 1.0) -> None:
        like = next((t for t in (layer.weight, layer.running_mean) if t is not None), torch.zeros(()))
        super().__init__(layer.num_features, layer.eps, layer.momentum, affine=False, track_running_stats=False,
                         device=like.device, dtype=like.dtype)  # fmt: skip
        self.weight, self.bias, self.affine = layer.weight, layer.bias, layer.affine
        self.track_running_stats = layer.track_running_stats
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        if "source_statistics" in vars(layer):
            object.__setattr__(self, "source_statistics", vars(layer)["source_statistics"])
        self.kind, self.reach, self.straight = kind, reach, False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        if self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        mean, var = self.statistics(x)
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = (-1, *[1] * (x.dim() - 2))
        return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [C] of a batch."""
        means, own = of_images(x if self.weight is None else x.to(self.weight.dtype))
        keep = usual(means, own) if self.kind == "screened" else None
        mean = self.middle(means, keep)
        squares = own + (means - mean).square()
        var = self.middle(squares, keep)
        if x.dim() == 2:
            var = var * (1 if self.kind == "clipped" else 2.198)      # of normal numbers the median square is 0.455
        return mean, var

    def middle(self, values: Tensor, keep: Tensor | None) -> Tensor:
        """What numbers [N, C] of images are in the middle [C]; of those to `keep`, if that is said."""
        center = median(values) if keep is None else median_of(values, keep)
        if self.kind == "clipped":
            limit = self.reach * median((values - center).abs())
            center = torch.minimum(torch.maximum(values, center - limit), center + limit).mean(0)
        if self.straight:
            plain = values.mean(0)
            center = plain + (center - plain).detach()
        return center


def of_images(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over its pixels, [N, C] each, of every image; of vectors themselves and zero."""
    pixels = tuple(range(2, x.dim()))
    if not pixels:
        return x, torch.zeros_like(x)
    var, mean = torch.var_mean(x, pixels, correction=0)
    return mean, var


def median(values: Tensor) -> Tensor:
    """The median [C] of values [N, C]; of an even number the mean of the two in the middle."""
    ordered = values.sort(0).values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def median_of(values: Tensor, keep: Tensor) -> Tensor:
    """The median [C] of those rows that `keep` [N] names, of which there is one at least."""
    ordered = values.masked_fill(~keep[:, None], torch.inf).sort(0).values
    count = keep.sum()
    both = torch.stack([(count - 1) // 2, count // 2])
    return ordered[both].mean(0)


def distances(values: Tensor) -> Tensor:
    """How far each row of values [N, K] lies from their middle [N], in median deviations, on average over K."""
    away = (values - median(values)).abs()
    return (away / median(away).clamp(min=1e-12)).clamp(max=FAR).mean(1)


def usual(means: Tensor, own: Tensor) -> Tensor:
    """Which images [N] of a batch, by their statistics [N, C], are about as far from its middle as the others are."""
    with torch.no_grad():
        far = distances(torch.cat([means, (own + 1e-12).log()], 1))
        return far <= ODD * median(far[:, None])


def robust_statistics(model: nn.Module, kind: str = "median", reach: float = 1.0) -> nn.Module:
    """The same network, on the same parameters, whose batch norms take batch statistics of bounded influence.

    Give it to any method that works by batch statistics: see `BoundedNorm` for the kinds. "batch" is the network itself.

    >>> network = robust_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "clipped")
    >>> network[1].kind
    'clipped'
    """
    check_kind(kind, reach)
    if kind == "batch":
        return model

    def make(layer: _BatchNorm) -> nn.Module:
        made = BoundedNorm(layer, kind, reach)
        for hook in layer._forward_pre_hooks.values():
            made.register_forward_pre_hook(hook)
        return made

    return replaced(model, make)


def check_kind(kind: str, reach: float = 1.0) -> None:
    """A ConfigError unless these are statistics that there are."""
    if kind not in STATISTICS:
        raise ConfigError(f"statistics must be one of {', '.join(map(repr, STATISTICS))}, got {kind!r}")
    if not (isinstance(reach, (int, float)) and 0 < reach < float("inf")):
        raise ConfigError(f"reach is a number above 0 of median deviations, got {reach!r}")

