"""RoTTA: robust test-time adaptation in dynamic scenarios (Yuan et al., 2023)."""

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.functional import cross_entropy
from petal.methods.affine import norm_parameters
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.descent import Ema
from petal.methods.inputs import check_number
from petal.methods.mean_teacher import network_with
from petal.methods.memory import CSTU
from petal.norm import RobustNorm, following


class RoTTA(Adapter):
    """A teacher predicts with running statistics; the student learns from a balanced memory, the recent samples most.

    After every `every` samples of the stream, in the middle of a batch too, one step on the memory: the student's
    cross-entropy on an augmented view under the teacher, weighted by age (eq. 8-9). Statistics of both move by the share
    `norm_momentum` of what they see (`RobustNorm`, eq. 3-4), the teacher's parameters by 1 - `ema`. Labels and entropies of
    a batch (eq. 6: `timeliness`, `uncertainty`) are from its beginning. Defaults are those of the authors' code for CIFAR.

    The authors' code adapts batch norms only; here, as in public code after it, group and layer norms do too. It learns with
    dropout, which is off here, as in all methods. Weights by age are computed in float32, as there.
    """

    card = Card(
        title="RoTTA", year=2023, adapts=AFFINE, small_batches=True, correlated_labels=True,
        paper="Yuan et al., Robust test-time adaptation in dynamic scenarios, CVPR 2023",
    )  # fmt: skip
    alone = "it keeps a memory of its own"
    teacher: nn.Module

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        memory: int = 64,
        every: int = 64,
        ema: float = 0.999,
        norm_momentum: float = 0.05,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
        augment: Augment | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        check_number("every", every, low=1, whole=True)
        check_number("ema", ema, low=0, high=1)
        check_number("norm_momentum", norm_momentum, low=0, high=1)
        super().__init__(
            model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, norm_momentum), steps=steps,
            episodic=episodic, seed=seed,
        )  # fmt: skip
        self.every, self.ema = every, ema
        self.augment = Views() if augment is None else augment
        self.memory = CSTU(self, memory, timeliness, uncertainty)
        self.register_network("teacher", network_with(self.model, None))
        self.register_statistics("model")
        self.register_statistics("teacher")
        self.adapt(norm_parameters(self), lr, optimizer)

    def step(self, x: Tensor) -> Tensor:
        """Predict, and take the batch into the memory."""
        logits = self.give(self.prediction(x))
        self.memory.learn(x, logits, self.every, self.update_from_memory)
        return logits

    def prediction(self, x: Tensor) -> Tensor:
        """The teacher's, by its running statistics."""
        with torch.no_grad():
            return self.logits(self.teacher, x)

    def update_from_memory(self) -> None:
        """One step of the student, and the teacher after it (Alg. 1, l. 9-12)."""
        x, ages = self.memory.samples()
        view = self.views_of(x, self.augment)
        with following(self.model, self.teacher) as keep_if:
            target = self.prediction(x)
            loss = cross_entropy(self.logits(self.model, view.make(view.draw())), target)
        weight = torch.exp(-(ages.double() / self.memory.capacity).float())
        weight = weight / (1 + weight)                                                      # eq. 9
        keep_if(self.descend((loss * weight).mean(), after=[Ema(self.teacher, self.ema)]))
