"""The source network, not adapted: the baseline that every table starts with."""

from torch import Tensor, nn

from petal.methods.base import Adapter
from petal.methods.card import Card


class Source(Adapter):
    """Predicts with the network as it is, by its own running statistics."""

    card = Card(
        title="Source", year=2019, adapts="nothing", small_batches=True, correlated_labels=True, random=False,
        paper="Hendrycks and Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, "
              "ICLR 2019",
    )  # fmt: skip

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False)

    def step(self, x: Tensor) -> Tensor:
        """Predict; there is nothing to adapt."""
        return self.prediction(x)
