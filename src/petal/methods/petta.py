"""PeTTA: persistent test-time adaptation in recurring testing scenarios (Hoang et al., 2024)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.augment import Augment, Views, in_full
from petal.functional import cross_entropy, symmetric_cross_entropy
from petal.methods.affine import norm_parameters
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.descent import Ema, Values, Weights
from petal.methods.inputs import check_choice, check_number
from petal.methods.mean_teacher import network_with
from petal.methods.memory import CSTU
from petal.norm import RobustNorm, following
from petal.statistics import SourceStatistics


class PeTTA(Adapter):
    """RoTTA's memory and norms; how fast and how far the weights move depends on how far the features have gone.

    After each batch one step on the memory (Alg. 1): `loss` "symmetric" (CIFAR) or "cross-entropy" (ImageNet) under the
    teacher, plus `anchor` times the cross-entropy under the source, plus the regularizer ("cosine", "l2" or "none") with
    the weight λ = `pull` · γ; the teacher moves by α = (1 - `ema`) · (1 - γ). γ = 1 - exp(-D) is in [0, 1], where D is the
    mean squared distance of the teacher's running class means to the source's, by the source's variance, over the classes
    of the batch (eq. 5-6). `adaptive_pull` and `adaptive_ema` switch the two uses of γ. Of the class means
    `prototype_momentum` stays. Defaults are those of the authors' code for CIFAR-10.

    `statistics` are those of `petal.collect_statistics(model, loader, ["prototypes"], labels="predicted",
    batch_statistics=False)`; the authors' are of the source's test split. A class of fewer than two images has no variance
    and takes no part in D (in the authors' code all becomes NaN). As there, the source's running statistics follow too.
    """

    card = Card(
        title="PeTTA", year=2024, adapts=AFFINE, needs=("prototypes",), small_batches=True, correlated_labels=True,
        paper="Hoang et al., Persistent test-time adaptation in recurring testing scenarios, NeurIPS 2024",
    )  # fmt: skip
    alone = "it keeps a memory of its own"
    teacher: nn.Module
    source: nn.Module
    prototypes: Tensor

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics,
        lr: float = 1e-3,
        memory: int = 64,
        ema: float = 0.999,
        norm_momentum: float = 0.05,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
        pull: float = 10.0,
        regularizer: str = "cosine",
        anchor: float = 1.0,
        loss: str = "symmetric",
        prototype_momentum: float = 0.95,
        adaptive_pull: bool = True,
        adaptive_ema: bool = True,
        augment: Augment | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        shares = (("ema", ema), ("norm_momentum", norm_momentum), ("prototype_momentum", prototype_momentum))
        for name, share in shares:
            check_number(name, share, low=0, high=1)
        check_number("pull", pull, low=0)
        check_number("anchor", anchor, low=0)
        check_choice("regularizer", regularizer, ("cosine", "l2", "none"))
        check_choice("loss", loss, ("symmetric", "cross-entropy"))
        statistics.check(model, "prototypes")
        super().__init__(
            model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, norm_momentum), steps=steps,
            episodic=episodic, seed=seed,
        )  # fmt: skip
        self.ema, self.pull, self.regularizer, self.anchor, self.loss = ema, pull, regularizer, anchor, loss
        self.prototype_momentum, self.adaptive_pull, self.adaptive_ema = prototype_momentum, adaptive_pull, adaptive_ema
        self.augment = Views() if augment is None else augment
        wide = torch.promote_types(self.dtype, torch.float32)       # squares of features leave the range of half precision
        self.statistics = statistics.to(self.device, wide)
        self.memory = CSTU(self, memory, timeliness, uncertainty)
        self.register_state("prototypes", self.statistics.prototypes)
        self.register_network("teacher", network_with(self.model, None))
        self.register_network("source", network_with(self.model, None), follows=False)
        for network in ("model", "teacher", "source"):
            self.register_statistics(network)
        self.adapt(norm_parameters(self), lr, optimizer, start=self.source)

    def step(self, x: Tensor) -> Tensor:
        """Alg. 1: predict and remember; then one step on the memory."""
        with torch.no_grad():
            features, logits = self.features(self.teacher, x)                               # l. 3
            self.give(logits)
            gamma = float(self.divergence(features, logits))                                # l. 5-10
        self.memory.learn(x, logits, len(x), lambda: None)
        if self.memory.held():
            self.update_from_memory(
                self.pull * gamma if self.adaptive_pull else self.pull,                     # l. 12
                (1 - self.ema) * (1 - gamma) if self.adaptive_ema else 1 - self.ema,        # l. 13
            )
        return logits

    def prediction(self, x: Tensor) -> Tensor:
        """The teacher's, by its running statistics."""
        with torch.no_grad():
            return self.features(self.teacher, x)[1]

    def divergence(self, features: Tensor, logits: Tensor) -> Tensor:
        """γ of the classes of this batch, by the class means of before it; then these move."""
        mean, var, counts = self.statistics.prototypes, self.statistics.variances, self.statistics.counts
        assert mean is not None
        assert var is not None
        assert counts is not None
        good = features.isfinite().all(1) & logits.isfinite().all(1)
        features = features.to(mean)
        members = F.one_hot(logits.softmax(1).argmax(1), len(mean)).to(features) * good[:, None]        # [N, C]
        count = members.sum(0)
        distance = ((self.prototypes - mean).square() / (var + 1e-6)).mean(1)
        seen = (count > 0) & (counts > 1)
        now = members.T @ features.where(good[:, None], 0) / count.clamp(min=1)[:, None]
        moved = now.lerp(self.prototypes, self.prototype_momentum)
        self.prototypes = moved.where(count[:, None] > 0, self.prototypes)
        return 1 - torch.exp(-distance.where(seen, 0).sum() / seen.sum().clamp(min=1))

    def update_from_memory(self, pull: float, follow: float) -> None:
        """One step of the student on the memory, and the teacher after it (l. 15-16)."""
        x, _ = self.memory.samples()
        view = self.views_of(x, self.augment)
        symmetric = self.loss == "symmetric"
        with following(self.model, self.teacher, self.source) as keep_if:
            with torch.no_grad():
                target, source = self.logits(self.teacher, x), self.logits(self.source, x)
            with torch.set_grad_enabled(symmetric):
                plain = self.logits(self.model, x)          # moves the student's statistics, whatever the loss
            augmented = self.logits(self.model, view.make(view.draw()))
        if symmetric:
            loss = 0.5 * symmetric_cross_entropy(plain, target) + 0.5 * symmetric_cross_entropy(augmented, target)
        else:
            loss = cross_entropy(augmented, target)
        loss = loss.mean() + self.anchor * cross_entropy(augmented, source).mean()
        toward = [] if self.regularizer == "none" else [Toward(self.origin(), self.regularizer, pull)]
        keep_if(self.descend(loss, toward, after=[Ema(self.teacher, 1 - follow)]))


@dataclass(frozen=True, eq=False)
class Toward:
    """weight · R(θ), by the mean over tensors of -cos(θ, origin), or of the squared distance ("l2") (PeTTA, eq. 7)."""

    origin: Values
    kind: str
    weight: float
    elementwise = False

    def add_(self, weights: Weights) -> None:
        """Add its gradient."""
        with torch.enable_grad():
            values = [in_full(value.detach()).requires_grad_() for value in weights.values]
            pairs = [(v, in_full(start)) for v, start in zip(values, weights.like(self.origin), strict=True)]
            if self.kind == "cosine":
                terms = [-F.cosine_similarity(value[None], start[None]).mean() for value, start in pairs]
            else:
                terms = [(value - start).square().sum() for value, start in pairs]
            gradients = torch.autograd.grad(torch.stack(terms).mean(), values)
        for gradient, more in zip(weights.gradients, gradients, strict=True):
            gradient.add_(more, alpha=self.weight)
