"""What TENT and pseudo-labelling share: they adapt the scale and shift of normalisation layers, and nothing else."""

import torch
from torch import nn

from petal.errors import ConfigError
from petal.methods.base import Adapter, OptimizerFactory
from petal.norm import affine_parameters


class AffineAdapter(Adapter):
    """Adapts the affine parameters of BatchNorm, GroupNorm and LayerNorm, with batch statistics."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        self.adapt(norm_parameters(self), lr, optimizer)


def norm_parameters(adapter: Adapter) -> dict[str, nn.Parameter]:
    """Scale and shift of the normalisation layers of a method's network; an error if it has none."""
    parameters = affine_parameters(adapter.model)
    if not parameters:
        raise ConfigError(
            f"{type(adapter).__name__} adapts the scale and shift of normalisation layers and this network has none: "
            "use CoTTA or Petal, which adapt every parameter"
        )
    return parameters
