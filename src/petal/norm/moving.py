"""Normalisation by running statistics that follow the batches a method learns from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.norm.layers import batch_norms, replaced, source_statistics


class MovingNorm(_BatchNorm):
    """A batch norm that predicts by running statistics and moves them while `following` its network.

    The switch is a number on the device, 0 or 1, and not a mode of the module: a recorded graph of the network reads it,
    and one recording serves predictions and learning.
    """

    running_mean: Tensor
    running_var: Tensor
    learning: Tensor
    momentum: float

    def __init__(self, layer: _BatchNorm, momentum: float) -> None:
        mean, var = source_statistics(layer)
        super().__init__(layer.num_features, layer.eps, momentum, affine=False, device=mean.device, dtype=mean.dtype)
        self.weight, self.bias, self.affine = layer.weight, layer.bias, layer.affine
        self.running_mean, self.running_var, self.num_batches_tracked = mean.clone(), var.clone(), None
        self.register_buffer("learning", torch.zeros_like(mean[0]), persistent=False)

    def scaled(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalise by statistics of a shape that broadcasts with the batch; then the layer's scale and shift."""
        shape = (-1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.view(shape)
        out = (x - mean) * scale
        return (out if self.bias is None else out + self.bias.view(shape)).to(x.dtype)

    def move(self, mean: Tensor, var: Tensor) -> None:
        """Set the running statistics."""
        with torch.no_grad():
            self.running_mean.copy_(mean.detach())
            self.running_var.copy_(var.detach())


class RobustNorm(MovingNorm):
    """RoTTA's robust batch norm (Yuan et al., 2023, eq. 3-4).

    While learning, the running statistics take up the share `momentum` of the batch's (its variance biased), and it is they
    that normalise, with gradient through the batch's share of them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the running statistics, after this batch if it is learned from."""
        shape = (-1, *[1] * (x.dim() - 2))
        var, mean = torch.var_mean(x.to(self.running_mean.dtype), (0, *range(2, x.dim())), correction=0)
        share = self.learning * self.momentum
        mean = (1 - share) * self.running_mean + share * mean
        var = (1 - share) * self.running_var + share * var
        self.move(mean, var)
        return self.scaled(x, mean.view(shape), var.view(shape))


class InstanceAwareNorm(MovingNorm):
    """NOTE's instance-aware batch norm (Gong et al., 2022, eq. 3-6).

    Each image is normalised by the batch's statistics (the running ones in predictions), corrected by what its own differ
    beyond `shrink` standard errors. Variances are unbiased. The running statistics take up the share `momentum` of the
    batch's while learning, and in training mode, so that networks can be trained with it: see `instance_aware`.
    """

    def __init__(self, layer: _BatchNorm, shrink: float, momentum: float) -> None:
        super().__init__(layer, momentum)
        self.shrink = shrink

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        values, pixels, shape = x.to(self.learning.dtype), tuple(range(2, x.dim())), (-1, *[1] * (x.dim() - 2))
        count = values[0, 0].numel()
        var, mean = torch.var_mean(values, (0, *pixels), correction=min(1, len(x) * count - 1))
        if self.running_mean is not None:                           # otherwise a method works by batch statistics
            learning = torch.ones_like(self.learning) if self.training else self.learning
            share = learning * self.momentum
            moved = (1 - share) * self.running_mean + share * mean, (1 - share) * self.running_var + share * var
            mean, var = mean.where(learning > 0, self.running_mean), var.where(learning > 0, self.running_var)
            self.move(*moved)
        mean, var = mean.view(shape), var.view(shape)
        if count > 1:
            own_var, own_mean = torch.var_mean(values, pixels, correction=1, keepdim=True)          # [N, C, 1, ...]
            error, error_var = ((var + self.eps) / count).sqrt(), (var + self.eps) * (2 / (count - 1)) ** 0.5
            mean = mean + shrunk(own_mean - mean, self.shrink * error)
            var = (var + shrunk(own_var - var, self.shrink * error_var)).relu()
        return self.scaled(x, mean, var)


def shrunk(x: Tensor, limit: Tensor) -> Tensor:
    """Nearer to zero by `limit`, and zero within it."""
    return (x - limit).relu() - (-x - limit).relu()


@contextmanager
def following(*networks: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    """In here the running statistics of these networks follow what they see.

    Gives a function that, called with a boolean on the device afterwards, puts them back where it is false: with what
    `descend` returns, statistics of images that nothing was learned from are forgotten.
    """
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, MovingNorm)]
    switches = list({id(layer.learning): layer.learning for layer in layers}.values())
    statistics = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
    before = [tensor.clone() for tensor in statistics]

    def keep_if(made: Tensor) -> None:
        for tensor, old in zip(statistics, before, strict=True):
            tensor.copy_(tensor.where(made, old))

    for switch in switches:
        switch.fill_(1)
    try:
        yield keep_if
    finally:
        for switch in switches:
            switch.fill_(0)


def share_switch(network: nn.Module) -> None:
    """Let the layers of a network have one switch, so that turning it is one operation."""
    layers = [layer for _, layer in batch_norms(network) if isinstance(layer, MovingNorm)]
    for layer in layers:
        layer.learning = layers[0].learning


def instance_aware(network: nn.Module, shrink: float = 4.0) -> nn.Module:
    """The same network, on the same parameters, with `InstanceAwareNorm`: train it like this for NOTE."""
    return replaced(network, lambda layer: InstanceAwareNorm(layer, shrink, layer.momentum or 0.1))
