"""SANTA: an anchored network with contrast to source prototypes (Chakrabarty et al., 2023)."""

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.errors import ConfigError
from petal.functional import cross_entropy
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.contrast import Contrast
from petal.methods.inputs import check_number
from petal.methods.mean_teacher import network_with
from petal.norm import affine_parameters
from petal.statistics import SourceStatistics


class SANTA(Adapter):
    """The source network, by batch statistics, as an anchor, and a contrastive loss with source prototypes.

    The adapting network's probabilities of the batch and of a view weigh the anchor's log-probabilities. `consistency` and
    `contrast` are the weights of the two losses. Normalisation layers adapt, and the projector of `Contrast` learns.
    """

    card = Card(
        title="SANTA", year=2023, adapts=AFFINE, needs=("prototypes",),
        paper="Chakrabarty et al., SANTA: source anchoring network and target alignment for continual test time adaptation, "
              "TMLR 2023",
    )  # fmt: skip

    anchor: nn.Module

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics,
        lr: float = 1e-3,
        temperature: float = 0.1,
        projection: int = 128,
        consistency: float = 1.0,
        contrast: float = 1.0,
        augment: Augment | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        check_number("consistency", consistency, low=0)
        check_number("contrast", contrast, low=0)
        parameters = affine_parameters(self.model)
        if not parameters:
            raise ConfigError("SANTA adapts normalisation layers and this network has none: use RMT")
        self.consistency, self.contrast = consistency, contrast
        self.augment = Views() if augment is None else augment
        self.against = Contrast(self, statistics, projection, temperature)
        self.register_network("anchor", network_with(self.model, None), follows=False)
        self.adapt(parameters | self.against.parameters, lr, optimizer, start=self.anchor)

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on both losses."""
        features, logits = self.features(self.model, x)
        self.give(logits)
        features_again, again = self.features(self.model, self.augmented(x, self.augment))
        with torch.no_grad():
            anchor = self.logits(self.anchor, x)
        held = 0.5 * cross_entropy(anchor, logits) + 0.5 * cross_entropy(anchor, again)
        self.descend(self.consistency * held.mean() + self.contrast * self.against(features, features_again))
        return logits

    def prediction(self, x: Tensor) -> Tensor:
        """The network's logits."""
        return self.features(self.model, x)[1]
