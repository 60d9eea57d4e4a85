"""BN Adapt: the source's weights with the normalisation statistics of the batch (Li et al.; Schneider et al.)."""

from torch import Tensor, nn

from petal.errors import ConfigError
from petal.methods.base import Adapter
from petal.methods.card import Card
from petal.methods.inputs import check_number
from petal.norm import MixedNorm, batch_norms


class BatchNorm(Adapter):
    """Predicts with batch statistics in every batch-norm layer, or with a mix; no parameter changes.

    `share` is the weight of the batch's statistics, 1 - share that of the source's (Schneider et al., eq. 3, where
    share = n / (N + n) and the source counts as N images). With share=1 the batch's variance is the biased one, as torch's
    own batch norm takes it; a mix takes the unbiased one, as public code does (alpha-BN).
    """

    card = Card(
        title="BN Adapt", year=2020, adapts="statistics of batch norm", needs=("batch norm",), random=False,
        paper="Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, "
              "NeurIPS 2020",
    )  # fmt: skip

    def __init__(self, model: nn.Module, share: float = 1.0) -> None:
        check_number("share", share, low=0, high=1)
        mixed = None if share == 1 else lambda layer: MixedNorm(layer, share)
        super().__init__(model, batch_statistics=mixed is None, norm=mixed)
        if not batch_norms(self.model):
            raise ConfigError(
                "BatchNorm adapts the statistics of batch-norm layers and this network has none: use Tent, CoTTA or Petal"
            )

    def step(self, x: Tensor) -> Tensor:
        """Predict; the statistics are those of the batch itself, or the mix."""
        return self.prediction(x)
