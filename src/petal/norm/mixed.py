"""Normalisation by a mix of the source's statistics and those of the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from petal.norm.layers import source_statistics


class MixedNorm(_BatchNorm):
    """Batch norm by (1 - share) of the source's statistics and `share` of the batch's (Schneider et al., 2020, eq. 3).

    The batch's variance is the unbiased one, and no gradient flows through statistics, as in public code of the field. One
    value a channel has no variance: then the source's statistics count alone.
    """

    def __init__(self, layer: _BatchNorm, share: float) -> None:
        mean, var = source_statistics(layer)
        super().__init__(layer.num_features, layer.eps, affine=False, device=mean.device, dtype=mean.dtype)
        self.weight, self.bias, self.affine = layer.weight, layer.bias, layer.affine
        self.running_mean, self.running_var, self.num_batches_tracked = mean.clone(), var.clone(), None
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if x.numel() > x.shape[1]:
            with torch.no_grad():
                seen_var, seen_mean = torch.var_mean(x.to(mean.dtype), (0, *range(2, x.dim())), correction=1)
                mean = (1 - self.share) * mean + self.share * seen_mean
                var = (1 - self.share) * var + self.share * seen_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, training=False, eps=self.eps)
