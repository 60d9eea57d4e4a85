"""Normalisation by statistics of the source and of recent images, for any batch size (`SmallBatch`)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.norm.layers import replaced, source_statistics

GROUPS = 16             # classes beyond share their estimates with others
LIMIT = 512             # images at a time
BOUND = 4.0             # standard deviations that one image's statistics may lie from the estimate


class Following(nn.Module):
    """What all `RecentNorm` of some networks share: the labels of the next images, and what counts for them.

    Tensors on the device, and never others in their place, so that recorded graphs of the networks read them.
    """

    used: Tensor
    keep: Tensor
    weights: Tensor
    rates: Tensor
    pull: Tensor
    shuffled: Tensor

    def __init__(self, window: float, like: Tensor) -> None:
        super().__init__()
        self.window, self.classes = window, 0
        shapes = {"used": (GROUPS,), "keep": (), "weights": (LIMIT, GROUPS + 1), "rates": (GROUPS + 1,)}
        for name, shape in (shapes | {"pull": (), "shuffled": ()}).items():
            self.register_buffer(name, torch.zeros(shape, device=like.device, dtype=like.dtype), persistent=False)
        self.begin(0)

    def begin(self, classes: int) -> None:
        """Say how many classes there are; 0 where that is not known."""
        self.classes, groups = classes, min(classes, GROUPS) or GROUPS
        self.used.zero_()[:groups].fill_(1 / groups)                            # how much each average counts
        self.keep.fill_(math.log1p(-min(groups / self.window, 0.999)))          # log of what one image leaves of its class

    def expect(self, labels: Tensor | None, shuffled: float, pull: float = 0.0) -> None:
        """The next images have these labels, -1 where that is not known. Classes are drawn together by the share `pull`.

        `shuffled` is how sure it is that labels come in no order: so much counts the average over all images. Those of the
        classes move as if the images came one after the other.
        """
        self.weights.zero_()
        self.rates.zero_()
        self.shuffled.fill_(shuffled)
        self.pull.fill_(pull)
        if labels is not None:
            known = (labels >= 0)[:, None]
            members = (labels[:, None] % GROUPS == torch.arange(GROUPS, device=labels.device)) & known
            count = members.cumsum(0)
            later = (count[-1] - count).to(self.keep.dtype)
            self.weights[: len(labels)] = torch.cat([members * torch.exp(later * self.keep), known], 1)
            every = math.log1p(-min(1 / self.window, 0.999)) * known.sum(0)
            self.rates.copy_(-torch.expm1(torch.cat([count[-1] * self.keep, every])))


class RecentNorm(nn.Module):
    """Batch norm by statistics of recent images and of the source, the same for a batch of 1 and of 200.

    For each class it keeps moving averages of the channels' mean and mean square over the images so labelled, of about
    `window` / classes images each, which begin at the source's. The estimate is their mean over the classes, however often
    each came, with the share `source` of the source's own statistics; each image is normalised by it with the share `own`
    of its own statistics. As far as labels are known to come in no order (`Following`), the average over about the last
    `window` images takes the place of all that. Images whose labels are known move the averages before they are normalised.

    One image's statistics count no further than `BOUND` standard deviations from the estimate, and not at all if they are
    not finite. More than `GROUPS` classes share as many averages, in turn.
    """

    start: Tensor
    recent: Tensor
    moved: Tensor

    def __init__(self, layer: _BatchNorm, following: Following, source: float, own: float) -> None:
        super().__init__()
        mean, var = source_statistics(layer)
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.source_share, self.own_share, self.following = source, own, following
        self.register_buffer("start", torch.stack([mean, var + mean.square()]))                     # [2, C]
        self.register_buffer("recent", self.start[:, None].repeat(1, GROUPS + 1, 1))                # [2, groups and all, C]
        self.register_buffer("moved", self.recent.clone(), persistent=False)                        # after this batch

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and note in `moved` where the batch moves the averages."""
        values, pixels = x.to(self.start.dtype), tuple(range(2, x.dim()))
        seen = torch.stack([values.mean(pixels), values.square().mean(pixels)] if pixels else [values, values.square()])
        good = seen.isfinite().all(0).all(1)                                                        # [n]
        seen = self.bounded(seen.where(good[:, None], self.start[:, None]), self.estimate(self.recent))
        moved = self.after(seen, good)
        self.moved.copy_(moved)
        own = self.own_share * (1 - self.following.shuffled)
        mean, square = self.estimate(moved)[:, None].lerp(seen, own)                                # [n, C] each
        least = 0.05 * (self.start[1] - self.start[0].square())                     # a share of the source's variance
        scale = (torch.maximum(square - mean.square(), least) + self.eps).rsqrt()
        shift = -mean * scale
        if self.weight is not None and self.bias is not None:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        shape = (*scale.shape, *[1] * len(pixels))
        return torch.addcmul(shift.reshape(shape), values, scale.reshape(shape)).to(x.dtype)

    def estimate(self, recent: Tensor) -> Tensor:
        """Mean and mean square [2, C]: every class counts the same, or every image."""
        classes = (recent[:, :-1] * self.following.used[:, None]).sum(1).lerp(self.start, self.source_share)
        return classes.lerp(recent[:, -1], self.following.shuffled)

    def bounded(self, seen: Tensor, estimate: Tensor) -> Tensor:
        """Statistics [2, n, C] of images, no further from the estimate than one image may be."""
        mean, square = estimate
        var = torch.maximum(square - mean.square(), 0.05 * (self.start[1] - self.start[0].square())) + self.eps
        reach = BOUND * var.sqrt()
        own = seen[0].clamp(mean - reach, mean + reach)
        return torch.stack([own, own.square() + (seen[1] - seen[0].square()).clamp(min=0).minimum(BOUND**2 * var)])

    def after(self, seen: Tensor, good: Tensor) -> Tensor:
        """The averages after these images."""
        following = self.following
        weights = following.weights[: seen.shape[1]] * good[:, None]                                # [n, groups and all]
        total = weights.sum(0)
        there = (total > 0).to(seen.dtype)
        means = weights.T @ seen / (total + 1 - there)[:, None]                                     # [2, groups and all, C]
        classes = there[:-1, None]
        common = (means[:, :-1] * classes).sum(1, keepdim=True) / classes.sum().clamp(min=1)
        recent = self.recent.lerp(common, following.pull * classes.amax())
        return recent.lerp(means, (following.rates * there)[:, None])


def with_recent_norm(network: nn.Module, following: Following, **options: float) -> tuple[nn.Module, list[RecentNorm]]:
    """The same network, on the same parameters, with every batch norm replaced by a `RecentNorm`; and those layers."""
    layers: list[RecentNorm] = []

    def make(layer: _BatchNorm) -> RecentNorm:
        layers.append(RecentNorm(layer, following, **options))
        return layers[-1]

    return replaced(network, make).eval(), layers
