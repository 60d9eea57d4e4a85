"""ETA: entropy minimisation on samples that are reliable and not redundant (Niu et al., 2022)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.filters import Redundancy, masked_mean, reliable
from petal.methods.affine import AffineAdapter, entropy_by
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.descent import Penalty
from petal.methods.inputs import check_number


class ETA(AffineAdapter):
    """EATA without its regulariser. The defaults are those for CIFAR-10; ImageNet has similarity=0.05.

    A sample counts if its entropy is below E_0 = `margin` · ln C (eq. 3) and its prediction unlike the mean of those that
    counted (eq. 5: |cosine| < `similarity`); the mean moves by 1 - `momentum` a batch. With loss="come", COME's entropy
    is filtered, weighted and minimised in the place of the prediction's; the margin stays a share of ln C.
    """

    card = Card(
        title="ETA", year=2022, adapts=AFFINE, random=False,
        paper="Niu et al., Efficient test-time model adaptation without forgetting, ICML 2022",
    )  # fmt: skip
    mean: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        margin: float = 0.4,
        similarity: float = 0.4,
        momentum: float = 0.9,
        loss: str = "entropy",
        *,
        frozen: Sequence[str] = (),
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        check_number("margin", margin, low=0)
        check_number("similarity", similarity, low=0, high=1)
        check_number("momentum", momentum, low=0, high=1)
        self.margin, self.redundancy = margin, Redundancy(similarity, momentum)
        self.loss, self.uncertainty = loss, entropy_by(loss)
        self.register_state("mean", None)       # of the predictions that counted [C]

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the samples that count; none if there are none."""
        logits = self.give(self.logits(self.model, x))
        loss = self.uncertainty(logits)
        probabilities, classes = logits.detach().softmax(1), logits.shape[1]
        keep = reliable(loss, self.margin, classes) & self.redundancy.unlike(probabilities, self.mean)
        weights = 1 / torch.exp(loss.detach() - self.margin * math.log(classes))        # eq. 4
        self.descend(masked_mean(loss * weights, keep), self.penalties(), when=keep.any())
        self.mean = self.redundancy.follow(probabilities, self.mean, keep)
        return logits

    def penalties(self) -> list[Penalty]:
        """What is added to the objective: nothing here, the Fisher regulariser in EATA."""
        return []
