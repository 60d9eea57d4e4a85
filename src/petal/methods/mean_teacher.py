"""What CoTTA and PETAL share: a student, its moving-average teacher, a frozen source, and predictions over views."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.augment import Augment, Views
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.descent import After, Ema, Penalty, PutBack
from petal.methods.inputs import check_choice, check_number
from petal.methods.network import Sharing, ViewSource
from petal.restore import Restore

CONSISTENCY = {"cross-entropy": F.cross_entropy, "symmetric": F.symmetric_cross_entropy}


class MeanTeacher(Adapter):
    """Student, teacher and source networks, all by batch statistics, and the teacher's prediction over views.

    All parameters of the network adapt.
    """

    teacher: nn.Module
    source: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        ema: float,
        views: int,
        confidence: float,
        restore: Restore | None,
        augment: Augment | None,
        gate: str,
        average: str,
        loss: str,
        optimizer: OptimizerFactory | None,
        steps: int,
        episodic: bool,
        seed: int | torch.Generator,
        start: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        check_number("ema", ema, low=0, high=1)
        check_number("views", views, low=0, whole=True)
        check_number("confidence", confidence)
        check_choice("gate", gate, ("sample", "batch"))
        check_choice("average", average, ("probs", "logits"))
        check_choice("loss", loss, CONSISTENCY)
        self.ema, self.views, self.confidence = ema, views, confidence
        self.restore, self.gate, self.average, self.loss = restore, gate, average, loss
        self.augment = Views() if augment is None else augment
        self.sharing: Sharing | None = None

        with torch.inference_mode(False), torch.no_grad():
            source = network_with(self.model, start)
            for name, buffer in source.named_buffers():
                if buffers is not None and name in buffers:
                    buffer.copy_(buffers[name])
            self.model = network_with(source, None)
            self.register_network("teacher", network_with(source, None))
            self.register_network("source", source, follows=False)
        self.adapt(dict(self.model.named_parameters()), lr, optimizer, start=source)

    def step(self, x: Tensor) -> Tensor:
        """Adapt(θ', θ, θ_0, B, q), Algorithm 2 of the PETAL paper."""
        target = self.prediction(x)                                             # l. 3-5
        loss = self.consistency(self.logits(self.model, x), target).mean()      # l. 6-7
        self.descend(loss, self.penalties(), self.after())                      # l. 10-15
        return target

    def prediction(self, x: Tensor) -> Tensor:
        """The teacher's prediction y' (Alg. 2, l. 3-5): plain where the source is sure, over K views where it is not.

        Views are computed only if some sample needs them, and then for the whole batch.
        """
        with torch.no_grad():
            needed = self.needs_views(x)
            self.views_used, everywhere = torch.stack([needed.any(), needed.all()]).tolist()
            if not self.views_used:
                return self.logits(self.teacher, x)
            views = ViewSource(x, self.augment, self.views, self.generator, self.sharing)
            average = self.network(self.teacher).over(views, self.average)
            return average if everywhere else torch.where(needed[:, None], average, self.logits(self.teacher, x))

    def needs_views(self, x: Tensor) -> Tensor:
        """Which samples take the average over views: those the source is not sure of, one by one or all by the mean."""
        if self.views == 0:
            return x.new_zeros(x.shape[0], dtype=torch.bool)
        confidence = F.confidence(self.logits(self.source, x))
        if self.gate == "batch":
            confidence = confidence.mean().expand(x.shape[0])
        needed = confidence < self.confidence
        return needed if self.sharing is None else self.sharing.decided(needed)

    def consistency(self, logits: Tensor, target: Tensor) -> Tensor:
        """The student's loss for every sample, under the teacher's prediction (Alg. 2, l. 7)."""
        return CONSISTENCY[self.loss](logits, target)

    def penalties(self) -> list[Penalty]:
        """What is added to the objective: nothing here, the prior in PETAL (l. 10)."""
        return []

    def after(self) -> list[After]:
        """The teacher's average (l. 12), then the restore (l. 13-15)."""
        average: list[After] = [Ema(self.teacher, self.ema)]
        return average if self.restore is None else [*average, PutBack(self.restore, self.source)]


def network_with(network: nn.Module, parameters: Mapping[str, Tensor] | None) -> nn.Module:
    """A frozen copy of a network, on the given parameter tensors themselves if there are any: no second copy is kept."""
    memo: dict[int, object] = {}
    if parameters is not None:
        for name, parameter in network.named_parameters():
            memo[id(parameter)] = nn.Parameter(parameters[name], requires_grad=False)
    with torch.inference_mode(False):
        return deepcopy(network, memo).requires_grad_(False)
