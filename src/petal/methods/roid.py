"""ROID: a loss for certain and diverse samples, weights held near the source, and a prior (Marsden et al., 2024)."""

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.functional import symmetric_cross_entropy
from petal.losses import certain_and_diverse, smoothed_prior, soft_likelihood_ratio
from petal.methods.affine import AffineAdapter
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, NO_BATCH_NORM, Card
from petal.methods.descent import After, Pull
from petal.methods.inputs import check_choice, check_number

VIEWS = Views(sigma=(0.001, 0.001), noise=0.0)      # without blur and noise


class ROID(AffineAdapter):
    """Soft likelihood ratio and consistency with one view, weighted by certainty and diversity, over normalisation layers.

    After every step `share` of the weights is the source's. `momentum` is that of the mean prediction that diversity is
    measured against. Sums over a batch are divided by `batch_size`, by default the number of its images. The view is of the
    images that count, as a batch of its own (`augmented="kept"`): the device is asked for their number, and the shape
    changes from batch to batch, so that no graph is recorded; "all" takes every image and a weight of 0 for the others.
    `weighting=False` counts all images alike; `consistency` is the weight of that loss, and 0 makes no view. Where all
    images are equally diverse or certain, the released code divides by zero (a batch of one does); here they weigh the same.

    The released code multiplies the LOGITS by the prior: this is `answer="own"`, whose confidences compare with nobody's.
    "calibrated" multiplies the probabilities, as Bayes' rule does, and "logits" are the network's own. By default images
    are augmented as in the released code, but for the pixels from outside: edges repeat and are not mirrored.
    """

    card = Card(
        title="ROID", year=2024, adapts=AFFINE, correlated_labels=NO_BATCH_NORM,
        paper="Marsden et al., Universal test-time adaptation through weight ensembling, diversity weighting, and prior "
              "correction, WACV 2024",
    )  # fmt: skip

    mean: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        share: float = 0.01,
        temperature: float = 1 / 3,
        momentum: float = 0.9,
        weighting: bool = True,
        consistency: float = 1.0,
        augment: Augment | None = None,
        augmented: str = "kept",
        answer: str = "own",
        batch_size: int | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        check_number("share", share, low=0, high=1)
        check_number("temperature", temperature, low=1e-6)
        check_number("momentum", momentum, low=0, high=1)
        check_number("consistency", consistency, low=0)
        check_number("batch_size", 1 if batch_size is None else batch_size, low=1, whole=True)
        check_choice("augmented", augmented, ("kept", "all"))
        check_choice("answer", answer, ("own", "calibrated", "logits"))
        self.share, self.temperature, self.momentum = share, temperature, momentum
        self.weighting, self.consistency, self.batch_size = weighting, consistency, batch_size
        self.augment, self.whole, self.answer = VIEWS if augment is None else augment, augmented == "all", answer
        self.start = self.origin()
        self.register_state("mean", None)

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the weighted losses."""
        logits = self.give(self.logits(self.model, x))
        with torch.no_grad():
            uniform = logits.new_full(logits.shape[1:], 1 / logits.shape[1])
            mean = uniform if self.mean is None else torch.where(self.mean.any(), self.mean, uniform)
            weights, counts = certain_and_diverse(logits, mean, self.temperature)
            following = mean.lerp(logits.softmax(1).mean(0), 1 - self.momentum)
            if not self.weighting:
                weights, counts = torch.ones_like(weights), torch.ones_like(counts)
        loss = (weights * soft_likelihood_ratio(logits)).sum()
        if self.consistency:
            which = slice(None) if self.whole or not self.weighting else self.apart(counts)
            again = self.logits(self.model, self.augmented(x[which], self.augment))
            loss = loss + self.consistency * (weights[which] * symmetric_cross_entropy(again, logits[which])).sum()
        made = self.descend(loss / (self.batch_size or len(x)), after=self.after())
        self.mean = torch.where(made, following, mean)
        return logits

    def after(self) -> list[After]:
        """Weight ensembling: the weights stay near the source's."""
        return [Pull(self.start, self.share)]

    def corrected(self, logits: Tensor) -> Tensor:
        """Logits with the prior of their batch, in the form asked for."""
        if self.answer == "logits":
            return logits
        prior = smoothed_prior(logits)
        return logits * prior if self.answer == "own" else (logits.log_softmax(1) + prior.log()).log_softmax(1)
