"""RMT: a robust mean teacher with contrast to source prototypes and replay of source data (Döbler et al., 2023)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.augment import Augment
from petal.methods.base import OptimizerFactory
from petal.methods.card import Card
from petal.methods.contrast import Contrast
from petal.methods.inputs import check_number
from petal.methods.self_training import SelfTraining
from petal.statistics import SourceStatistics


class RMT(SelfTraining):
    """Symmetric cross-entropy with a teacher, on the batch and a view, and a contrastive loss with source prototypes.

    With `source_data`, batches (x, y) of LABELLED source data as a list or loader, student and teacher warm up on `warm_up`
    of its images, and one of its batches is learned in every step, with the weight `replay`. Without, both are left out: the
    released code's source-free form but for its warm-up. `consistency` and `contrast` are the weights of the other losses.
    See `SelfTraining` for `answer` and `adapts`, `Contrast` for `projection`. The released code's contrast from prototypes
    alone ("one") is not offered: it compares them with projected features, of another width.
    """

    card = Card(
        title="RMT", year=2023, adapts="all weights", needs=("prototypes",),
        paper="Döbler et al., Robust mean teacher for continual and gradual test-time adaptation, CVPR 2023",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics,
        lr: float = 1e-3,
        ema: float = 0.999,
        temperature: float = 0.1,
        projection: int = 128,
        consistency: float = 1.0,
        contrast: float = 1.0,
        replay: float = 1.0,
        warm_up: int = 50_000,
        source_data: Iterable[Any] | None = None,
        augment: Augment | None = None,
        adapts: str = "weights",
        answer: str = "own",
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(
            model, ema=ema, consistency=consistency, augment=augment, answer=answer, adapts=adapts, steps=steps,
            episodic=episodic, seed=seed,
        )  # fmt: skip
        check_number("contrast", contrast, low=0)
        check_number("replay", replay, low=0)
        check_number("warm_up", warm_up, low=0, whole=True)
        self.contrast, self.replay = contrast, replay
        self.against = Contrast(self, statistics, projection, temperature)
        self.begin(lr, optimizer, self.against.parameters)
        if source_data is not None:
            self.warm_up(source_data, warm_up, ramp=True)

    def step(self, x: Tensor) -> Tensor:
        """Predict by student and teacher, then one step of the student on all losses."""
        features, logits = self.features(self.model, x)
        features_again, again = self.features(self.model, self.augmented(x, self.augment))
        with torch.no_grad():
            target = self.logits(self.teacher, x)
        loss = self.consistency * self.self_training(logits, again, target)
        loss = loss + self.contrast * self.against(features, features_again)
        if self.source_data is not None and self.replay:
            source, labels = self.source_batch()
            loss = loss + self.replay * F.cross_entropy(self.logits(self.model, source), labels)
        self.follow(loss)
        return self.answered(logits.detach(), target)
