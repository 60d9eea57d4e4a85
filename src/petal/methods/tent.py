"""TENT: minimise the entropy of the prediction (Wang et al., 2021)."""

from torch import Tensor

from petal.functional import entropy
from petal.methods.affine import AffineAdapter


class Tent(AffineAdapter):
    """Fully test-time adaptation by entropy minimisation. TENT-online is this with a reset at every domain change."""

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the mean entropy of the prediction."""
        logits = self.logits(self.model, x)
        self.descend(entropy(logits).mean())
        return logits
