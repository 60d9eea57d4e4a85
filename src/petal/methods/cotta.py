"""CoTTA: weight-averaged and augmentation-averaged predictions, and stochastic restoration (Wang et al., 2022)."""

import torch
from torch import nn

from petal.augment import Augment
from petal.methods.base import OptimizerFactory, Rates
from petal.methods.card import Card
from petal.methods.mean_teacher import MeanTeacher
from petal.restore import Restore, Stochastic


class CoTTA(MeanTeacher):
    """PETAL without its prior, as a special case; defaults are those of CoTTA's released code for CIFAR-10."""

    card = Card(
        title="CoTTA", year=2022, adapts="all weights",
        paper="Wang et al., Continual test-time domain adaptation, CVPR 2022",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        lr: Rates = 1e-3,
        ema: float = 0.999,
        views: int = 32,
        confidence: float = 0.92,
        restore: Restore | None = Stochastic(0.01),
        augment: Augment | None = None,
        gate: str = "batch",
        average: str = "logits",
        loss: str = "cross-entropy",
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(
            model, lr=lr, ema=ema, views=views, confidence=confidence, restore=restore, augment=augment, gate=gate,
            average=average, loss=loss, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed,
        )  # fmt: skip
