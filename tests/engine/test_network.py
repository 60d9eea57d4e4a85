"""Networks in the form in which the engine runs them: finding the features changes nothing."""

import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal.engine import Policy
from petal.norm import RobustNorm, following


class Watching(petal.Adapter):
    """Asks for features while running statistics follow the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, 0.2))
        self.register_statistics("model")

    def step(self, x: Tensor) -> Tensor:
        with following(self.model):
            return self.features(self.model, x)[1]


def test_statistics_follow_a_batch_once_though_the_layer_with_the_features_is_looked_for() -> None:
    plain, fast = Watching(network()), petal.accelerate(Watching(network()), policy=Policy())
    for seed in range(2):
        torch.testing.assert_close(fast(images(seed=seed)), plain(images(seed=seed)), rtol=1e-4, atol=1e-4)
        for (name, mine), (_, theirs) in zip(fast.model.named_buffers(), plain.model.named_buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{name} after batch {seed}")
