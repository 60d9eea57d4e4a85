"""Networks in the form in which they run fast: channels-last, convolutions and linear layers in low precision."""

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from petal.calls import logits_in
from petal.engine.flat import Layout
from petal.methods.network import Features
from petal.norm import shared_copy


class Member:
    """A network of an adapter: its adapted parameters in one flat tensor, and copies of its weights in low precision.

    The copies are made anew when the weights have been changed since, by whomever. A network on the parameters of another,
    such as one with other norms, has its flat tensor, and makes copies anew each time: what changes them asks no one.
    """

    def __init__(self, module: nn.Module, layout: Layout, others: Iterable["Member"] = ()) -> None:
        self.module, self.layout = module, layout
        self.parameters = dict(module.named_parameters())
        self.tensors = {name: id(parameter) for name, parameter in self.parameters.items()}
        same = (other.flat for other in others if other.flat is not None and other.tensors == self.tensors)
        self.shared: Tensor | None = next(same, None)
        self.flat: Tensor | None = self.shared
        if self.flat is None and layout.fits(self.parameters):
            self.flat = layout.adopt(module)
        self.adapted = set(layout.names) if self.flat is not None else set()
        if layout.channels_last:
            for name, parameter in self.parameters.items():
                if name not in self.adapted and parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.low_flat: Tensor | None = None
        self.low_others: dict[str, Tensor] = {}
        self.networks: dict[bool, nn.Module] = {}
        self.stamp = -1

    def in_low_precision(self, low: torch.dtype, adapted: bool) -> nn.Module:
        """The same network with copies for its matrix weights, to be run under autocast, which has none left to convert.

        Those of `adapted` parameters are among them only if asked for: a network that learns multiplies by the originals.
        """
        if adapted not in self.networks:
            layers = [name for name, layer in self.module.named_modules() if isinstance(layer, (_ConvNd, nn.Linear))]
            matrices = {f"{name}.weight".lstrip(".") for name in layers}
            for name in self.parameters.keys() & matrices - self.adapted - self.low_others.keys():
                self.low_others[name] = self.parameters[name].detach().to(low)
            lows = dict(self.low_others)
            if adapted and self.flat is not None:
                self.low_flat = self.flat.to(low)
                views = self.layout.views(self.low_flat)
                lows |= {name: view for name, view in views.items() if name in matrices}
            copies = {id(self.parameters[name]): nn.Parameter(low, requires_grad=False) for name, low in lows.items()}
            self.networks[adapted] = shared_copy(self.module, copies)
            self.refresh()
        elif self.shared is not None or self.stamp != self._versions():
            self.refresh()
        return self.networks[adapted]

    def refresh(self) -> None:
        """Bring the copies up to date."""
        with torch.no_grad():
            for name, value in self.low_others.items():
                value.copy_(self.parameters[name])
            if self.low_flat is not None and self.flat is not None:
                self.low_flat.copy_(self.flat)
        self.stamp = self._versions()

    def is_current(self) -> None:
        """Whoever changed the weights has changed the copies with them."""
        self.stamp = self._versions()

    def forget_copies(self) -> None:
        """For another precision."""
        self.low_flat, self.low_others, self.networks = None, {}, {}

    def _versions(self) -> int:
        flat = 0 if self.flat is None else self.flat._version
        return flat + sum(p._version for p in self.parameters.values())


class WithFeatures(nn.Module):
    """A network that returns what its layer called `last` is given, and then its logits: without hooks, to be compiled."""

    def __init__(self, network: nn.Module, last: str) -> None:
        super().__init__()
        self.kept = _Kept(network.get_submodule(last))
        self.network = shared_copy(network, {id(self.kept.layer): self.kept})

    def forward(self, x: Tensor) -> Features:
        """Features [N, D] and logits [N, C]."""
        logits = logits_in(self.network(x))
        features, self.kept.features = self.kept.features, None
        assert features is not None
        return Features(features, logits)


class _Kept(nn.Module):
    """A layer, and what it was given."""

    features: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        self.features = x
        return self.layer(x)  # type: ignore[no-any-return]


class StoredScale(nn.BatchNorm2d):
    """A batch norm by the statistics of the batch, in a form that gets a short loop from the compiler on a CPU.

    Left to itself it computes 1 / sqrt(variance) anew for every pixel. The result of a reduction is stored instead: here
    that of a maximum over two copies.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        scale = torch.rsqrt(var + self.eps) * self.weight
        both = torch.stack([scale, self.bias - mean * scale])
        scale, shift = both.expand(2, *both.shape).amax(0)[..., None, None].unbind()
        return x * scale + shift


def with_stored_scales(network: nn.Module) -> nn.Module:
    """The same network, to be compiled for predictions on a CPU; parameters and buffers are shared with it."""
    fast = {}
    for layer in network.modules():
        if type(layer) is nn.BatchNorm2d and layer.affine and layer.running_mean is None:
            fast[id(layer)] = stored = copy(layer)
            stored.__class__ = StoredScale
    return shared_copy(network, fast)
