"""What CoTTA and PETAL share: a student, its moving-average teacher, a frozen source, and predictions over views."""

import inspect
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.augment import Augment, Views
from petal.errors import InputError
from petal.methods.base import Adapter, OptimizerFactory, check_choice, check_number
from petal.restore import Restore

CONSISTENCY = {"cross-entropy": F.cross_entropy, "symmetric": F.symmetric_cross_entropy}


class Sharing(Protocol):
    """How processes share out the views of a batch (see `petal.parallel`)."""

    def decided(self, needed: Tensor) -> Tensor:
        """Which samples need views, the same for all processes."""
        ...

    def computes(self, view: int) -> bool:
        """Whether a view is this process's to compute."""
        ...

    def gathered(self, mine: list[Tensor], views: int) -> Tensor:
        """The predictions of all views, in their order, from this process's own."""
        ...


class MeanTeacher(Adapter):
    """Student, teacher and source networks, all by batch statistics, and the teacher's prediction over views.

    All parameters of the network adapt. A subclass writes the step.
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
        self.consistency = CONSISTENCY[loss]
        self.augment = Views() if augment is None else augment
        self._augment_draws = _takes_generator(self.augment)
        self.sharing: Sharing | None = None

        with torch.inference_mode(False), torch.no_grad():
            self.source = network_with(self.model, start)
            for name, buffer in self.source.named_buffers():
                if buffers is not None and name in buffers:
                    buffer.copy_(buffers[name])
            self.model = network_with(self.source, None)
            self.teacher = network_with(self.source, None)
        self.adapt(dict(self.model.named_parameters()), lr, optimizer)

    def prediction(self, x: Tensor) -> Tensor:
        """The teacher's prediction y' (Alg. 2, l. 3-5): plain where the source is sure, over K views where it is not.

        Views are computed only if some sample needs them, and then for the whole batch.
        """
        with torch.no_grad():
            needed = self.needs_views(x)
            self.views_used = bool(needed.any())
            if not self.views_used:
                return self.forward_through(self.teacher, x)
            average = self.average_over_views(x)
            if bool(needed.all()):
                return average
            return torch.where(needed[:, None], average, self.forward_through(self.teacher, x))

    def needs_views(self, x: Tensor) -> Tensor:
        """Which samples take the average over views: those the source is not sure of, one by one or all by the mean."""
        if self.views == 0:
            return x.new_zeros(x.shape[0], dtype=torch.bool)
        confidence = F.confidence(self.forward_through(self.source, x))
        if self.gate == "batch":
            confidence = confidence.mean().expand(x.shape[0])
        needed = confidence < self.confidence
        return needed if self.sharing is None else self.sharing.decided(needed)

    def average_over_views(self, x: Tensor) -> Tensor:
        """The teacher's mean prediction over K views: of the logits, or of the probabilities, as their logarithm."""
        total: Tensor | None = None
        for logits in self.predictions_of_views(x):
            if self.average == "logits":
                total = logits if total is None else total + logits
            else:
                logits = logits.log_softmax(1)
                total = logits if total is None else torch.logaddexp(total, logits)
        assert total is not None
        return total / self.views if self.average == "logits" else total - math.log(self.views)

    def predictions_of_views(self, x: Tensor) -> Iterable[Tensor]:
        """The teacher's logits of each view, in order; where processes share the views out, those of all of them."""
        if self.sharing is None:
            return (self.forward_through(self.teacher, self.view(x)) for _ in range(self.views))
        mine: list[Tensor] = []
        for number in range(self.views):
            if self.sharing.computes(number):
                mine.append(self.forward_through(self.teacher, self.view(x)))
            elif type(self.augment) is Views:
                self.augment.skip(x, self.generator)
            else:
                self.view(x)  # how many random numbers it draws is its own affair
        return self.sharing.gathered(mine, self.views)

    def view(self, x: Tensor) -> Tensor:
        """One view of the batch. An augmentation that takes a `generator` gets the method's own."""
        out = self.augment(x, generator=self.generator) if self._augment_draws else self.augment(x)  # type: ignore[call-arg]
        if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            what = f"{list(out.shape)} {out.dtype} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
            raise InputError(f"augment must return a batch like its input {list(x.shape)} {x.dtype}, got {what}")
        return out

    def masks(self) -> list[Tensor] | None:
        """Which weights the restore puts back after this step, from the gradients (Alg. 2, l. 13-14)."""
        if self.restore is None:
            return None
        parameters = list(self.adapted.values())
        masks = self.restore.masks(parameters, self.generator)
        self.restored = sum(m.sum() for m in masks) / sum(p.numel() for p in parameters)
        return masks

    def average_teacher(self) -> None:
        """θ' ← π θ' + (1 - π) θ (Alg. 2, l. 12)."""
        F.ema_([p.detach() for p in self.teacher.parameters()], [p.detach() for p in self.adapted.values()], self.ema)

    def restore_student(self, masks: list[Tensor] | None) -> None:
        """θ ← m θ_0 + (1 - m) θ (Alg. 2, l. 15); the teacher and the optimizer's moments stay."""
        if masks is not None:
            F.restore_([p.detach() for p in self.adapted.values()], list(self.source.parameters()), masks)

    def origin(self) -> dict[str, Tensor]:
        """The source network's parameters themselves: no copy is kept."""
        return {name: p.detach() for name, p in self.source.named_parameters()}

    def _weights(self) -> dict[str, Tensor]:
        return super()._weights() | {f"teacher.{name}": p for name, p in self.teacher.named_parameters()}

    def _restore_initial(self) -> None:
        for network in (self.model, self.teacher):
            for parameter, original in zip(network.parameters(), self.source.parameters(), strict=True):
                parameter.copy_(original)


def network_with(network: nn.Module, parameters: Mapping[str, Tensor] | None) -> nn.Module:
    """A frozen copy of a network, on the given parameter tensors themselves if there are any: no second copy is kept."""
    memo: dict[int, object] = {}
    if parameters is not None:
        for name, parameter in network.named_parameters():
            memo[id(parameter)] = nn.Parameter(parameters[name], requires_grad=False)
    return deepcopy(network, memo).requires_grad_(False)


def _takes_generator(augment: Augment) -> bool:
    try:
        parameters = inspect.signature(augment).parameters
    except (TypeError, ValueError):
        return False
    return "generator" in parameters
