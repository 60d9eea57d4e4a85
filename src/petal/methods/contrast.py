"""What contrastive methods share: source prototypes, and a projector that learns beside the network (RMT, SANTA, GOLD)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from petal.errors import ConfigError
from petal.losses import contrastive, nearest
from petal.methods.base import Adapter
from petal.methods.inputs import check_number
from petal.norm import AFFINE_LAYERS, affine_parameters
from petal.statistics import SourceStatistics

ADAPTS = ("weights", "conv", "norm", "all")


class Contrast:
    """The contrastive loss of a batch's features, those of a view of it, and the source prototypes nearest to the first.

    Features go through a projector, two linear layers and a ReLU, of width `projection`; with 0 there is none. Its weights
    begin at random numbers of the adapter's own, and are parameters of the network: what holds of those holds of them.
    """

    def __init__(self, adapter: Adapter, statistics: SourceStatistics, projection: int, temperature: float) -> None:
        check_number("projection", projection, low=0, whole=True)
        check_number("temperature", temperature, low=1e-6)
        self.prototypes, self.there = prototypes_of(adapter, statistics)
        self.temperature = temperature
        widths = [self.prototypes.shape[1], projection, projection]
        self.parameters: dict[str, nn.Parameter] = {}
        for layer in (1, 2) if projection else ():
            bound = 1 / math.sqrt(widths[layer - 1])        # as torch begins a linear layer
            for name, shape in (("weight", (projection, widths[layer - 1])), ("bias", (projection,))):
                value = torch.empty(shape, device=adapter.device, dtype=adapter.dtype)
                value.uniform_(-bound, bound, generator=adapter.generator)
                self.parameters |= head(adapter, f"projector_{name}_{layer}", value)

    def __call__(self, features: Tensor, again: Tensor) -> Tensor:
        """The loss, from features [N, D] of the batch and of its view."""
        prototypes = nearest(features.detach(), self.prototypes, self.there)
        return contrastive(self.projected(torch.stack([prototypes, features, again])), self.temperature)

    def projected(self, features: Tensor) -> Tensor:
        """Features [..., D] through the projector."""
        if not self.parameters:
            return features
        weight, bias, weight_2, bias_2 = self.parameters.values()
        return F.linear(F.linear(features, weight, bias).relu(), weight_2, bias_2)


def prototypes_of(adapter: Adapter, statistics: SourceStatistics) -> tuple[Tensor, Tensor]:
    """The source prototypes [C, D], and of which classes there are any [C]."""
    kind = type(adapter).__name__
    if not isinstance(statistics, SourceStatistics):
        raise ConfigError(f"{kind} takes source statistics (petal.collect_statistics), got {type(statistics).__name__}")
    statistics.check(adapter.model, "prototypes")
    assert statistics.prototypes is not None
    assert statistics.counts is not None
    return statistics.prototypes.to(adapter.device, adapter.dtype), statistics.counts.to(adapter.device) > 0


def classifier(model: nn.Module) -> tuple[str, nn.Linear]:
    """Name and layer of the last linear layer."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ConfigError("the method needs a network that ends in a linear layer, and this one has none")
    return layers[-1]


def head(adapter: Adapter, name: str, value: Tensor) -> dict[str, nn.Parameter]:
    """A further parameter of the network, which its own forward pass does not use. `reset` keeps its random numbers."""
    if hasattr(adapter.model, name):
        raise ConfigError(f"the network has something called {name!r}, as {type(adapter).__name__} has: rename it")
    with torch.inference_mode(False):
        parameter = nn.Parameter(value.clone())
    adapter.model.register_parameter(name, parameter)
    adapter.begin_here()
    return {name: parameter}


def chosen(model: nn.Module, adapts: str) -> dict[str, nn.Parameter]:
    """Parameters by name: those called weight and bias, which the field's code trains, of which layers, or all."""
    if adapts == "norm":
        return affine_parameters(model)
    known = dict(model.named_parameters())
    if adapts == "all":
        return known
    known = {name: parameter for name, parameter in known.items() if name.rpartition(".")[2] in ("weight", "bias")}
    if adapts == "weights":
        return known
    layers = {name for name, layer in model.named_modules() if isinstance(layer, (*AFFINE_LAYERS, _ConvNd))}
    return {name: parameter for name, parameter in known.items() if name.rpartition(".")[0] in layers}
