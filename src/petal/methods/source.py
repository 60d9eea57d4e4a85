"""The source network, not adapted: the baseline that every table starts with."""

from torch import Tensor, nn

from petal.methods.base import Adapter


class Source(Adapter):
    """Predicts with the network as it is, by its own running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False)

    def step(self, x: Tensor) -> Tensor:
        """Predict; there is nothing to adapt."""
        return self.prediction(x)
