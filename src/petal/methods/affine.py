"""What TENT and pseudo-labelling share: they adapt the scale and shift of normalisation layers, and nothing else."""

import torch
from torch import nn

from petal.errors import ConfigError
from petal.methods.base import Adapter, OptimizerFactory, Rates
from petal.norm import affine_parameters


class AffineAdapter(Adapter):
    """Adapts the affine parameters of BatchNorm, GroupNorm and LayerNorm, with batch statistics."""

    def __init__(
        self,
        model: nn.Module,
        lr: Rates = 1e-3,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        parameters = affine_parameters(self.model)
        if not parameters:
            raise ConfigError(
                f"{type(self).__name__} adapts the scale and shift of normalisation layers and this network has none: "
                "use CoTTA or Petal, which adapt every parameter"
            )
        self.adapt(parameters, lr, optimizer)
