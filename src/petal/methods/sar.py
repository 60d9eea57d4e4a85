"""SAR: sharpness-aware and reliable entropy minimisation (Niu et al., 2023)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.filters import masked_mean, reliable
from petal.methods.affine import TOP_LAYERS, AffineAdapter, entropy_by
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, NO_BATCH_NORM, Card
from petal.methods.inputs import check_number
from petal.methods.resets import LossAverage, restart


class SAR(AffineAdapter):
    """Entropy of reliable samples, minimised where it is flat (eq. 2 to 5), with a reset when it has become too low.

    As in the released code the top layers stay as they are, by name: those of torchvision's and timm's ResNets and timm's
    ViT; for others give `frozen` patterns, () for none. A batch of which nothing is reliable makes a step with a gradient
    of zero, so that momentum goes on; with skip_empty=True it makes none.

    When the moving average of the loss falls below `reset_threshold`, weights go back to the start. In all released code
    the optimizer's buffers live on; reset_optimizer=True clears them. The average begins anew, as in the collection; in
    the authors' code it is written over with the old value and most often resets again: reset_average=False.
    """

    card = Card(
        title="SAR", year=2023, adapts=AFFINE, small_batches=NO_BATCH_NORM, correlated_labels=NO_BATCH_NORM, random=False,
        paper="Niu et al., Towards stable test-time adaptation in dynamic wild world, ICLR 2023",
    )  # fmt: skip
    average: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        margin: float = 0.4,
        rho: float = 0.05,
        reset_threshold: float = 0.2,
        momentum: float = 0.9,
        loss: str = "entropy",
        *,
        reset_optimizer: bool = False,
        reset_average: bool = True,
        skip_empty: bool = False,
        frozen: Sequence[str] = TOP_LAYERS,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        check_number("margin", margin, low=0)
        check_number("rho", rho, low=0)
        check_number("reset_threshold", reset_threshold, low=0)
        check_number("momentum", momentum, low=0, high=1)
        self.margin, self.rho, self.level = margin, rho, LossAverage(reset_threshold, momentum)
        self.reset_optimizer, self.reset_average, self.skip_empty = reset_optimizer, reset_average, skip_empty
        self.loss, self.uncertainty = loss, entropy_by(loss)
        self.register_state("average", torch.full((), math.inf, device=self.device, dtype=self.dtype))

    def step(self, x: Tensor) -> Tensor:
        """Predict, look where the loss is highest nearby, step with the gradient of there, and perhaps reset."""
        logits = self.give(self.logits(self.model, x))
        assert self.descent is not None
        first = self.uncertainty(logits)
        keep = reliable(first, self.margin, logits.shape[1])
        with self.descent.perturbed(masked_mean(first, keep), self.rho) as moved:       # eq. 4
            second = self.uncertainty(self.logits(self.model, x))
            keep = keep & reliable(second, self.margin, logits.shape[1])
            loss = masked_mean(second, keep)
            self.descend(loss, when=moved & keep.any() if self.skip_empty else moved)   # eq. 5
        self.average = self.level.follow(self.average, loss, keep.any())
        collapsed = self.level.collapsed(self.average)
        restart(self, self.start, collapsed, optimizer=self.reset_optimizer)
        if self.reset_average:
            self.average = self.average.masked_fill(collapsed, math.inf)
        return logits
