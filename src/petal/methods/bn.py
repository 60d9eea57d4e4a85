"""BN Adapt: the source's weights with the normalisation statistics of the batch (Li et al.; Schneider et al.)."""

from torch import Tensor, nn

from petal.errors import ConfigError
from petal.methods.base import Adapter
from petal.methods.card import Card
from petal.norm import batch_norms


class BatchNorm(Adapter):
    """Predicts with batch statistics in every batch-norm layer; no parameter changes."""

    card = Card(
        title="BN Adapt", year=2020, adapts="statistics of batch norm", needs=("batch norm",), random=False,
        paper="Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020",
    )  # fmt: skip

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)
        if not batch_norms(self.model):
            raise ConfigError(
                "BatchNorm adapts the statistics of batch-norm layers and this network has none: use Tent, CoTTA or Petal"
            )

    def step(self, x: Tensor) -> Tensor:
        """Predict; the statistics are those of the batch itself."""
        return self.prediction(x)
