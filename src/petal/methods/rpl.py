"""RPL: robust pseudo-labels (Rusak et al., 2022)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.functional import generalised_cross_entropy
from petal.methods.affine import AffineAdapter
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.inputs import check_number


class RPL(AffineAdapter):
    """Generalised cross-entropy (1 - p^q) / q with the predicted labels: wrong ones weigh less than in cross-entropy."""

    card = Card(
        title="RPL", year=2022, adapts=AFFINE, random=False,
        paper="Rusak et al., If your data distribution shifts, use self-learning, TMLR 2022",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        q: float = 0.8,
        *,
        frozen: Sequence[str] = (),
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        check_number("q", q, low=1e-6, high=1)
        self.q = q

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step toward the predicted labels."""
        logits = self.give(self.logits(self.model, x))
        self.descend(generalised_cross_entropy(logits, logits.argmax(1), self.q).mean())
        return logits
