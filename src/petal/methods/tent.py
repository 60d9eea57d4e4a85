"""TENT: minimise the entropy of the prediction (Wang et al., 2021)."""

from torch import Tensor

from petal.functional import entropy
from petal.methods.affine import AffineAdapter
from petal.methods.card import AFFINE, Card


class Tent(AffineAdapter):
    """Fully test-time adaptation by entropy minimisation. TENT-online is this with a reset at every domain change."""

    card = Card(
        title="TENT", year=2021, adapts=AFFINE, random=False,
        paper="Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021",
    )  # fmt: skip

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the mean entropy of the prediction."""
        logits = self.logits(self.model, x)
        self.descend(entropy(logits).mean())
        return logits
