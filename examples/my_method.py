"""A method of one's own: TENT that listens most to the samples it is sure of, and to classes that are rare so far.

    petal check examples/my_method.py
    petal run digits --plugin examples/my_method.py --method tent --method mine
"""

import math

import torch
from torch import Tensor, nn

import petal
from petal.functional import entropy
from petal.norm import affine_parameters


class WeightedTent(petal.Adapter):
    """Minimises the entropy of reliable samples, the less frequent the predicted class so far the more."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, margin: float = 0.4, momentum: float = 0.9, seed: int = 0):
        super().__init__(model, batch_statistics=True, seed=seed)
        self.margin, self.momentum = margin, momentum
        self.adapt(affine_parameters(self.model), lr)                # which parameters adapt, by Adam
        self.register_state("mean", None)                            # the mean prediction so far [C]: state like weights

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the weighted entropy."""
        logits = self.logits(self.model, x)
        uncertainty = entropy(logits)                                # [N], in nats
        known = uncertainty.detach()
        limit = self.margin * math.log(logits.shape[1])
        now = logits.detach().softmax(1)
        if self.mean is None:
            self.mean = now.mean(0)
        rare = 1 - now @ self.mean
        weight = torch.exp(limit - known) * rare * (known < limit)
        made = self.descend((weight * uncertainty).mean(), when=(known < limit).any())
        self.mean = torch.where(made, self.mean.lerp(now.mean(0), 1 - self.momentum), self.mean)
        return logits


petal.METHODS["mine"] = WeightedTent
