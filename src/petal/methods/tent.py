"""TENT: minimise the entropy of the prediction (Wang et al., 2021)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.methods.affine import AffineAdapter, entropy_by
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, Card


class Tent(AffineAdapter):
    """Fully test-time adaptation by entropy minimization. TENT-online is this with a reset at every domain change.

    With loss="come" it is COME (Zhang et al., ICLR 2025): the entropy of the opinion, with the logits' length held.
    """

    card = Card(
        title="TENT", year=2021, adapts=AFFINE, random=False,
        paper="Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        loss: str = "entropy",
        *,
        frozen: Sequence[str] = (),
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        self.loss, self.uncertainty = loss, entropy_by(loss)

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the mean entropy of the prediction."""
        logits = self.give(self.logits(self.model, x))
        self.descend(self.uncertainty(logits).mean())
        return logits
