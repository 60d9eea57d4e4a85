"""A method of one's own: TENT that listens most to the samples it is sure of.

    petal run digits --plugin examples/my_method.py --method tent --method mine
"""

import math

import torch
from torch import Tensor, nn

import petal
from petal.functional import entropy
from petal.norm import affine_parameters


class WeightedTent(petal.Adapter):
    """Minimises the entropy of the prediction, each sample weighted by how low its entropy already is."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, margin: float = 0.4, seed: int = 0) -> None:
        super().__init__(model, batch_statistics=True, seed=seed)
        self.margin = margin
        self.adapt(affine_parameters(self.model), lr)                # which parameters adapt, by Adam
        self.start = {name: p.detach().clone() for name, p in self.adapted.items()}

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the weighted entropy."""
        logits = self.forward_through(self.model, x)
        uncertainty = entropy(logits)                                # [N], in nats
        limit = self.margin * math.log(logits.shape[1])
        weight = torch.exp(limit - uncertainty.detach()) * (uncertainty.detach() < limit)
        self.update((weight * uncertainty).mean())                   # skipped if it is not finite
        return logits

    def _restore_initial(self) -> None:                              # for reset()
        for name, parameter in self.adapted.items():
            parameter.copy_(self.start[name])


petal.METHODS["mine"] = WeightedTent
