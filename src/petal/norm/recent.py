"""Normalisation by statistics of the source and of recent images, for any batch size (`SmallBatch`)."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.norm.layers import replaced, source_statistics


class RecentNorm(nn.Module):
    """Batch norm by statistics of the source and of recent samples, the same for a batch of 1 and of 1,000.

    For each class it keeps moving averages of the channels' mean and mean square over the samples so labelled, of about
    `window` / classes samples each, which begin at the source's. The estimate is their mean over the classes, however often
    each came, with the share `source` of the source's own statistics; each image is normalised by it with the share `own` of
    its own statistics.
    """

    start: Tensor
    recent: Tensor

    def __init__(self, layer: _BatchNorm, window: float, source: float, own: float) -> None:
        super().__init__()
        mean, var = source_statistics(layer)
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.window, self.source_share, self.own_share = window, source, own
        self.register_buffer("start", torch.stack([mean, var + mean.square()]))     # [2, C]
        self.register_buffer("recent", self.start[:, None])                         # [2, classes (1 at first), C]
        self.seen: Tensor | None = None                                             # [2, n, C]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and remember the images' own statistics for `learn`."""
        pixels = tuple(range(2, x.dim()))
        self.seen = torch.stack([x.mean(pixels), x.square().mean(pixels)] if pixels else [x, x.square()])
        estimate = self.recent.mean(1).lerp(self.start, self.source_share)          # [2, C]
        mean, square = estimate[:, None].lerp(self.seen, self.own_share)            # [n, C] each
        least = 0.05 * (self.start[1] - self.start[0].square())                     # a share of the source's variance
        scale = (torch.maximum(square - mean.square(), least) + self.eps).rsqrt()
        shift = -mean * scale
        if self.weight is not None and self.bias is not None:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        shape = (*scale.shape, *[1] * len(pixels))
        return torch.addcmul(shift.reshape(shape), x, scale.reshape(shape))

    def learn(self, labels: Tensor, classes: int) -> None:
        """Move the averages of the classes that the last batch was labelled with."""
        assert self.seen is not None
        members = nn.functional.one_hot(labels, classes).to(self.seen.dtype)        # [n, classes]
        count = members.sum(0)
        means = members.T @ self.seen / count.clamp(min=1)[:, None]                 # [2, classes, C]
        moved = 1 - (1 - min(classes / self.window, 1.0)) ** count
        self.recent = self.recent.expand_as(means).lerp(means, moved[:, None])

    def restart(self) -> None:
        """Back to the source's statistics."""
        self.recent = self.start[:, None]


def with_recent_norm(network: nn.Module, **options: float) -> tuple[nn.Module, list[RecentNorm]]:
    """The same network, on the same parameters, with every batch norm replaced by a `RecentNorm`; and those layers."""
    layers: list[RecentNorm] = []

    def make(layer: _BatchNorm) -> RecentNorm:
        layers.append(RecentNorm(layer, **options))
        return layers[-1]

    return replaced(network, make).eval(), layers
