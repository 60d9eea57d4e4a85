"""Pseudo-labelling: train on the network's own hard labels (Lee, 2013)."""

import torch.nn.functional as F
from torch import Tensor

from petal.methods.affine import AffineAdapter
from petal.methods.card import AFFINE, Card


class PseudoLabel(AffineAdapter):
    """Cross-entropy with the predicted labels, over the affine parameters of normalisation layers."""

    card = Card(
        title="Pseudo-label", year=2013, adapts=AFFINE, random=False,
        paper="Lee, Pseudo-label: the simple and efficient semi-supervised learning method for deep neural networks, 2013",
    )  # fmt: skip

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step toward the predicted labels."""
        logits = self.give(self.logits(self.model, x))
        self.descend(F.cross_entropy(logits, logits.argmax(1)))
        return logits
