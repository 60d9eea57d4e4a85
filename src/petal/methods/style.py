"""The style of a batch: what tells domains apart, whatever the images show."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from petal.errors import ConfigError
from petal.methods.inputs import check_number
from petal.methods.network import logits_of

Style = Callable[[Tensor], Tensor]      # a batch [N, ...] to a vector [D]


class LayerStyle:
    """The logarithm of the variance of every channel, over a batch, in what the first layers of a network give.

    Counted are the first `layers` convolutions or linear layers to run; the rest of the network is not run. ReservoirTTA
    takes three layers of a VGG-19 instead. The network is frozen and normalises by the statistics of its training: by those
    of the batch, the variances of one domain would be those of another.
    """

    def __init__(self, network: nn.Module, layers: int = 3) -> None:
        check_number("layers", layers, low=1, whole=True)
        self.network, self.layers = network, layers
        self.counted = [layer for layer in network.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
        if not self.counted:
            raise ConfigError("the network has no convolution and no linear layer to take a style from: give style=")

    def __call__(self, x: Tensor) -> Tensor:
        """The style [D] of a batch."""
        found: list[Tensor] = []

        def keep(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
            values = output.movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)            # [C, n]
            found.append(values.var(1, correction=min(1, values.shape[1] - 1)).clamp(min=1e-8).log())
            if len(found) == self.layers:
                raise _EnoughError

        handles = [layer.register_forward_hook(keep) for layer in self.counted]
        try:
            with torch.no_grad(), suppress(_EnoughError):
                logits_of(self.network, x)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(found)


class _EnoughError(Exception):
    """The layers that count have run."""
