"""Normalisation layers: batch-statistics mode and the choice of parameters, in one place for every method."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import ConfigError, InputError

AFFINE_LAYERS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own network inside torch.compile, DataParallel or DistributedDataParallel, with its own names.

    >>> [name for name, _ in unwrapped(nn.DataParallel(nn.Linear(1, 1))).named_parameters()]
    ['weight', 'bias']
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Name and layer of every batch normalisation (1d, 2d, 3d, synchronised)."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def affine_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Scale and shift of every BatchNorm, GroupNorm and LayerNorm: what TENT and pseudo-labelling adapt.

    >>> list(affine_parameters(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ['1.weight', '1.bias']
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, layer in model.named_modules()
        if isinstance(layer, AFFINE_LAYERS)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def network_copy(model: nn.Module, batch_statistics: bool) -> nn.Module:
    """A copy of the user's network for a method to work on: evaluation mode, so dropout and stochastic depth are off.

    With `batch_statistics`, every batch norm normalises by the statistics of the batch it sees, in every mode, and its
    running statistics are dropped.
    """
    with torch.inference_mode(False):
        network = deepcopy(unwrapped(model)).eval().requires_grad_(False)
        if any(tensor.is_inference() for tensor in network.state_dict().values()):
            raise InputError("the network holds inference tensors: build or load it outside torch.inference_mode()")
        if batch_statistics:
            for name, layer in batch_norms(network):
                _use_batch_statistics(name, layer)
    return network


def _use_batch_statistics(name: str, layer: _BatchNorm) -> None:
    if layer.running_mean is not None and layer.running_var is not None:
        kept = (layer.running_mean.clone(), layer.running_var.clone())
        object.__setattr__(layer, "source_statistics", kept)  # for `RecentNorm`; not part of the network's state
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not inputs:  # called as layer(input=x)
            return
        x = inputs[0]
        if x.numel() // max(x.shape[1], 1) < 2:
            raise InputError(
                f"batch norm {name!r} sees one value a channel (its input is {list(x.shape)}) and has no statistics to "
                "normalise by: give two images or more at a time"
            )

    layer.register_forward_pre_hook(check)


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


def source_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Running mean and variance of the source, also if the layer has since been put to batch statistics."""
    if layer.running_mean is not None and layer.running_var is not None:
        return layer.running_mean, layer.running_var
    found = getattr(layer, "source_statistics", None)
    if found is None:
        raise ConfigError("the network's batch norm keeps no running statistics: there is nothing to mix recent ones with")
    mean, var = found
    return mean, var


def with_recent_norm(network: nn.Module, **options: float) -> tuple[nn.Module, list[RecentNorm]]:
    """The same network, on the same parameters, with every batch norm replaced by a `RecentNorm`; and those layers."""
    memo: dict[int, object] = {id(p): p for p in network.parameters()}
    layers: list[RecentNorm] = []
    for _, layer in batch_norms(network):
        recent = RecentNorm(layer, **options)
        memo[id(layer)] = recent
        layers.append(recent)
    return deepcopy(network, memo).eval(), layers
