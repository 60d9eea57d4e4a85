"""A plugin: a method that takes its time, for tests of what happens meanwhile."""

import time

from torch import Tensor, nn

import petal


class Slow(petal.Adapter):
    """Predicts by the network, moves one bias a little at every step, and takes `seconds` for it."""

    def __init__(self, model: nn.Module, seconds: float = 0.2) -> None:
        super().__init__(model, batch_statistics=False)
        self.seconds = seconds
        name, bias = list(self.model.named_parameters())[-1]
        self.adapt({name: bias}, lr=1e-3)

    def step(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        logits = self.prediction(x)
        self.update(logits.sum())
        return logits.detach()


petal.METHODS["slow"] = Slow
