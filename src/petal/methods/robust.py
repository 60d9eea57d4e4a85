"""Defences of how a method normalises and learns: batch statistics of bounded influence, and steps of bounded length."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import ConfigError
from petal.methods.base import Adapter
from petal.methods.descent import Limit
from petal.methods.inputs import check_number
from petal.methods.wrapper import Wrapper
from petal.norm import BoundedNorm
from petal.norm.network import guarded_layer
from petal.norm.robust import check_kind
from petal.order import Keys


class Robust(Wrapper):
    """Lets a method work by batch statistics that no few images of a batch decide, and learn by steps of limited length.

    `norm` is the kind of `petal.norm.BoundedNorm` in all networks of the method: "median" (after MedBN), "clipped" at
    `reach` median deviations, "screened", or "batch", as they were. With `step`, no batch moves the weights further than
    this share of their length. The source's weights and checkpoints of the method are what they were.

    It goes around a method before `petal.accelerate`. Networks without batch norm have nothing to defend: they stay as they
    are. A method that has norms of its own (RoTTA, NOTE, BN with a share) is refused.
    """

    prefix = "robust."
    inner = True

    def __init__(self, adapter: Adapter, norm: str = "median", reach: float = 1.0, step: float | None = None) -> None:
        super().__init__(adapter)
        check_kind(norm, reach)
        if step is not None:
            check_number("step", step, low=1e-12)
        if isinstance(adapter, Wrapper) and not adapter.inner:
            raise ConfigError(f"Robust goes directly around a method; {adapter.kind} is wrapped already: swap the two")
        if adapter.executor is not None:
            raise ConfigError("Robust changes networks, and this method is accelerated: accelerate it afterwards")
        if step is not None and adapter.descent is None:
            raise ConfigError(f"{adapter.kind} learns nothing, so there is no step to limit: leave step out")
        self.norm, self.reach, self.step_limit = norm, reach, step
        if norm != "batch":
            with torch.inference_mode(False):
                put_in(adapter, norm, reach)
        if step is not None and adapter.descent is not None:
            adapter.descent.first = (*adapter.descent.first, Limit(step))

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict and adapt, as the method does."""
        with self.handing_on():
            logits: Tensor = self.adapter(x, stream=stream)
        return logits

    def describe(self) -> dict[str, str]:
        """What the method does, and how it is defended."""
        limit = "" if self.step_limit is None else f"; steps no longer than {self.step_limit:g} of the weights"
        return self.adapter.describe() | {"robust": f"{self.norm} statistics{limit}"}


def put_in(adapter: Adapter, kind: str, reach: float) -> None:
    """Put a `BoundedNorm` in the place of every batch norm of an adapter's networks."""
    made: dict[nn.Module, nn.Module] = {}
    own: list[str] = []
    for parent in list(adapter.modules()):
        for name, layer in parent.named_children():
            if type(layer).__module__.startswith("petal.norm") and not isinstance(layer, BoundedNorm):
                own.append(type(layer).__name__)
            elif isinstance(layer, _BatchNorm) and layer.running_mean is None:
                if layer not in made:
                    made[layer] = guarded_layer(name, BoundedNorm(layer, kind, reach)).train(layer.training)
                parent._modules[name] = made[layer]
            elif isinstance(layer, _BatchNorm):
                own.append("running statistics")
    if own and not made:
        raise ConfigError(f"{adapter.kind} normalises by {own[0]} and not by batch statistics: leave Robust out")
