"""What RMT, OBAO and GOLD share: a student learns from a teacher that follows it, on a batch and on a view of it."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.calls import inputs_and_labels, moved
from petal.errors import ConfigError
from petal.functional import symmetric_cross_entropy
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.contrast import ADAPTS, chosen
from petal.methods.descent import After, Ema
from petal.methods.inputs import check_choice, check_number
from petal.methods.mean_teacher import network_with


class SelfTraining(Adapter):
    """Student and teacher, both by batch statistics, and answers by both.

    `answer` "own" is the sum of their logits, as in the released codes: twice as sure as one network. "calibrated" is the
    mean, which ranks classes the same, and "logits" the student's. `adapts` is "weights" (parameters called weight and bias,
    as those codes have it), "conv" (of these, those of convolutions and normalisation layers), "norm" or "all".
    """

    teacher: nn.Module
    replayed: Tensor
    source_data: "SourceBatches | None" = None
    _warm: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None     # teacher and optimizer after a warm-up

    def __init__(
        self, model: nn.Module, *, ema: float, consistency: float, augment: Augment | None, answer: str, adapts: str,
        steps: int, episodic: bool, seed: int | torch.Generator,
    ) -> None:  # fmt: skip
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        check_number("ema", ema, low=0, high=1)
        check_number("consistency", consistency, low=0)
        check_choice("answer", answer, ("own", "calibrated", "logits"))
        check_choice("adapts", adapts, ADAPTS)
        self.ema, self.consistency, self.answer, self.adapts = ema, consistency, answer, adapts
        self.augment = Views() if augment is None else augment

    def begin(
        self, lr: float, optimizer: OptimizerFactory | None, heads: Mapping[str, nn.Parameter],
        without: Iterable[str] = (), shares: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Say what adapts, with further parameters of the network's and without some, and make the teacher.

        `shares` are of the rate, for parameters that have another than `lr`.
        """
        known = chosen(self.model, self.adapts)
        if not known.keys() - heads.keys():
            raise ConfigError(f"{type(self).__name__} adapts {self.adapts!r} parameters and this network has none")
        leave = set(without) - heads.keys()
        parameters = {name: parameter for name, parameter in (known | dict(heads)).items() if name not in leave}
        self.register_network("teacher", network_with(self.model, None))
        others = {name: share for name, share in (shares or {}).items() if share != 1}
        self.adapt(parameters, {name: lr * others.get(name, 1.0) for name in parameters} if others else lr, optimizer)

    def self_training(self, logits: Tensor, again: Tensor, target: Tensor) -> Tensor:
        """Symmetric cross-entropy with the teacher, of the batch and of its view."""
        loss = 0.5 * symmetric_cross_entropy(logits, target) + 0.5 * symmetric_cross_entropy(again, target)
        return loss.mean()

    def follow(self, loss: Tensor) -> Tensor:
        """A step, and the teacher after it."""
        return self.descend(loss, after=self.after())

    def after(self) -> list[After]:
        """The teacher's average."""
        return [Ema(self.teacher, self.ema)]

    def prediction(self, x: Tensor) -> Tensor:
        """By student and teacher."""
        return self.answered(self.features(self.model, x)[1], self.logits(self.teacher, x))

    def answered(self, logits: Tensor, target: Tensor) -> Tensor:
        """The logits of student and teacher as one answer."""
        if self.answer == "logits":
            return logits
        return logits + target if self.answer == "own" else (logits + target) / 2

    # Source data

    def warm_up(self, data: Iterable[Any], images: int, ramp: bool) -> None:
        """Let student and teacher learn from each other on so many source images; `reset` comes back to where this ends.

        With `ramp` the rate rises to its value meanwhile. No label is used. The data are kept, for `source_batch`.
        """
        check_number("warm_up", images, low=0, whole=True)
        self.source_data = SourceBatches(data, self.device, self.dtype)
        assert self.optimizer is not None
        rates = [group["lr"] for group in self.optimizer.param_groups]
        steps = images // len(self.source_data(0)[0])
        with torch.inference_mode(False), torch.enable_grad():
            for number in range(steps):
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (number + 1) / steps if ramp else rate
                x, _ = self.source_data(number)
                with torch.no_grad():
                    target = self.logits(self.teacher, x)
                self.follow(symmetric_cross_entropy(self.logits(self.model, x), target).mean())
            self._start = {name: value.detach().clone() for name, value in self.adapted.items()}
            teacher = dict(self.teacher.named_parameters())
            start = {name: teacher[name].detach().clone() for name in self.adapted}
            self._warm = start, deepcopy(self.optimizer.state_dict())
        self.register_state("replayed", torch.tensor(steps))

    def source_batch(self) -> tuple[Tensor, Tensor]:
        """The next images and labels of the source data."""
        assert self.source_data is not None
        batch = self.source_data(int(self.replayed))
        self.replayed = self.replayed + 1
        return batch

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._fresh_optimizer()
        if self._warm is not None:
            optimizer.load_state_dict(deepcopy(dict(self._warm[1])))
        return optimizer

    def _restart(self) -> None:
        super()._restart()
        if self._warm is not None:
            with torch.inference_mode(False), torch.no_grad():
                teacher = dict(self.teacher.named_parameters())
                for name, value in self._warm[0].items():
                    teacher[name].copy_(value)


class SourceBatches:
    """Batches (x, y) of source data over and over, by number: a list of them, or a loader that has a length.

    A stream that goes on from a checkpoint gets the batches that it would have got, if the data come in a fixed order.
    """

    def __init__(self, data: Any, device: torch.device, dtype: torch.dtype) -> None:
        if not hasattr(data, "__len__") or not hasattr(data, "__iter__") or isinstance(data, Tensor) or not len(data):
            raise ConfigError("source_data is a list of batches (x, y), or a loader of them that has a length")
        self.data, self.device = data, device
        self.like = torch.empty((), device=device, dtype=dtype)
        self.iterator, self.place = iter(data), 0

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch of this number, where the network is."""
        place = number % len(self.data)
        if place < self.place or place == 0:
            self.iterator, self.place = iter(self.data), 0
        while True:
            batch, self.place = next(self.iterator), self.place + 1
            if self.place > place:
                break
        x, y = inputs_and_labels(batch)
        if not isinstance(y, Tensor):
            raise ConfigError("source_data gives batches (x, y) of images and their labels")
        return moved(x, self.like), y.to(self.device)
