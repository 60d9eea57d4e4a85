"""GOLD: a teacher, contrast to prototypes, and features scaled in the classifier's own subspace (Lai et al., 2026)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.augment import Augment
from petal.methods.base import OptimizerFactory
from petal.methods.card import Card
from petal.methods.contrast import ADAPTS, Contrast, classifier, head
from petal.methods.inputs import check_choice, check_number
from petal.methods.self_training import SelfTraining
from petal.statistics import SourceStatistics


class GOLD(SelfTraining):
    """RMT's self-training and contrast, on features f + V (s · Vᵀ f) of the student, with `rank` scales s that learn from 0.

    V are the leading eigenvectors of M, which begins as WᵀW of the classifier's weights W and takes in, by the share `share`
    a batch, the mean of g gᵀ over samples whose confidence is `confidence` or more; g is the gradient of their largest logit
    by the features. V is renewed `every` so many batches; the scales keep their places in its order, as in the released
    code. Since g is a row of W, directions beyond the number of classes have eigenvalues near zero, and which ones they are
    is up to the linear algebra: with a larger rank runs on other machines may differ.

    In the paper the scales learn alone: adapts="scales" (and the projector of `Contrast`). The released code trains
    "weights" too for CIFAR, the default here, and "norm" for ImageNet; see `SelfTraining`, for `answer` as well. The scales
    learn at `scale_rate` times the rate. With `source_data`, batches of source data, student and teacher warm up on
    `warm_up` of its images.
    """

    card = Card(
        title="GOLD", year=2026, adapts="all weights, scales of features", needs=("prototypes",),
        paper="Lai et al., The golden subspace: where efficiency meets generalization in continual test-time adaptation, "
              "CVPR 2026",
    )  # fmt: skip

    moment: Tensor
    directions: Tensor
    batches: Tensor

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics,
        lr: float = 1e-3,
        ema: float = 0.999,
        rank: int = 64,
        share: float = 0.1,
        confidence: float = 0.8,
        every: int = 50,
        scale_rate: float = 1.0,
        temperature: float = 0.1,
        projection: int = 128,
        consistency: float = 1.0,
        contrast: float = 1.0,
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
        check_choice("adapts", adapts, (*ADAPTS, "scales"))
        super().__init__(
            model, ema=ema, consistency=consistency, augment=augment, answer=answer, steps=steps, episodic=episodic,
            adapts="all" if adapts == "scales" else adapts, seed=seed,
        )  # fmt: skip
        check_number("lr", lr, low=0)
        check_number("rank", rank, low=1, whole=True)
        check_number("share", share, low=0, high=1)
        check_number("confidence", confidence, low=0, high=1)
        check_number("every", every, low=1, whole=True)
        check_number("scale_rate", scale_rate, low=0)
        check_number("contrast", contrast, low=0)
        check_number("warm_up", warm_up, low=0, whole=True)
        self.share, self.confidence, self.every, self.contrast = share, confidence, every, contrast
        self.last, last = classifier(self.model)
        self.against = Contrast(self, statistics, projection, temperature)
        self.rank = min(rank, last.in_features)
        scales = head(self, "feature_scales", last.weight.new_zeros(self.rank))
        without = [name for name, _ in self.model.named_parameters()] if adapts == "scales" else []
        self.begin(lr, optimizer, self.against.parameters | scales, without, shares=dict.fromkeys(scales, scale_rate))
        (self.scales,) = scales.values()
        moment = (last.weight.T @ last.weight).detach()
        self.register_state("moment", moment)                               # M [D, D]
        self.register_state("directions", self.leading(moment))             # V [D, rank]
        self.register_state("batches", torch.zeros((), dtype=torch.int64, device=self.device))
        if source_data is not None:
            self.warm_up(source_data, warm_up, ramp=False)

    def step(self, x: Tensor) -> Tensor:
        """Predict by student and teacher, one step of the student on both losses, then what is seen of the subspace."""
        features, logits, plain = self.scaled(x)
        features_again, again, _ = self.scaled(self.augmented(x, self.augment))
        with torch.no_grad():
            target = self.logits(self.teacher, x)
            moment = self.seen(logits, plain)
        loss = self.consistency * self.self_training(logits, again, target)
        made = self.follow(loss + self.contrast * self.against(features, features_again))
        self.moment = torch.where(made, moment, self.moment)
        self.batches = self.batches + made
        if bool(made & (self.batches % self.every == 0)):
            self.directions = self.leading(self.moment)
        return self.answered(logits.detach(), target)

    def prediction(self, x: Tensor) -> Tensor:
        """By student and teacher."""
        return self.answered(self.scaled(x)[1], self.logits(self.teacher, x))

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The student's features with their scales, the logits of these, and the logits without scales."""
        features, logits = self.features(self.model, x)
        change = (self.scales * (features @ self.directions)) @ self.directions.T
        return features + change, logits + F.linear(change, self.classifier()), logits

    def seen(self, logits: Tensor, plain: Tensor) -> Tensor:
        """M after a batch; the same unless two samples or more are sure."""
        weight = self.classifier()
        sure = logits.softmax(1).amax(1) >= self.confidence
        count = (F.one_hot(plain.argmax(1), len(weight)) * sure[:, None]).sum(0).to(weight.dtype)      # by class
        outer = (weight * count[:, None]).T @ weight / count.sum().clamp(min=1)
        return torch.where(count.sum() >= 2, (1 - self.share) * self.moment + self.share * outer, self.moment)

    def leading(self, moment: Tensor) -> Tensor:
        """The eigenvectors of the largest eigenvalues, the largest first; torch has none of half precision."""
        vectors: Tensor = torch.linalg.eigh(moment.to(torch.promote_types(moment.dtype, torch.float32))).eigenvectors
        return vectors.flip(1)[:, : self.rank].to(moment.dtype).contiguous()

    def classifier(self) -> Tensor:
        """The weights of the last layer [C, D]."""
        return self.model.get_parameter(f"{self.last}.weight")
