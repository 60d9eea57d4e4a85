"""What CoTTA and PETAL share: a student, its moving-average teacher, a frozen source, and predictions averaged over them."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.augment import Augment, Views
from petal.errors import ConfigError, InputError
from petal.methods.base import Adapter, OptimizerFactory, Rates
from petal.methods.descent import After, Ema, Penalty, PutBack
from petal.methods.describe import in_short
from petal.methods.inputs import check_choice, check_number
from petal.methods.network import Sharing, mean_over
from petal.restore import Restore

CONSISTENCY = {"cross-entropy": F.cross_entropy, "symmetric": F.symmetric_cross_entropy}
LEARN = {"plain": ("student",), "view": ("student-view",), "both": ("student", "student-view")}
TEMPER = 0.1                                # log-temperature per step and unit of confidence above agreement
HOTTEST = math.log(4)
MEMBERS = ("teacher", "teacher-flip", "student", "student-flip", "samples")
BOTH = ("teacher", "teacher-flip")


class MeanTeacher(Adapter):
    """Student, teacher and source networks, all by batch statistics, and the teacher's prediction over views.

    All parameters of the network adapt. The student learns from the `target` on the batch ("plain"), on one view of it
    ("view"), or on both. `target` and `answer` are predictions averaged over members, joined by "+": "teacher", "student",
    and what these say of the mirror image, "teacher-flip" and "student-flip". With `warmup` the teacher follows faster at
    first: its average begins with a window of so many steps, which grows by one per step up to that of `ema`.

    `calibrate` names two members, or "student-view": while the answers are surer on average than these two agree, their
    temperature rises, and falls back to one where they are not. What two predictions of one image have in common they may
    have wrongly: they agree more often than they are right, and who is surer than that is too sure.
    """

    teacher: nn.Module
    source: nn.Module
    followed: Tensor
    log_temperature: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Rates,
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
        learn: str = "plain",
        target: str = "teacher",
        answer: str = "teacher",
        warmup: float | None = None,
        calibrate: str | None = None,
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
        check_choice("learn", learn, LEARN)
        if warmup is not None:
            check_number("warmup", warmup, low=1)
        self.ema, self.views, self.confidence = ema, views, confidence
        self.restore, self.gate, self.average, self.loss = restore, gate, average, loss
        self.target, self.answer = members("target", target), members("answer", answer)
        self.students, self.warmup = LEARN[learn], warmup
        self.pair = () if calibrate is None else members("calibrate", calibrate, (*MEMBERS, "student-view"))
        if len(self.pair) not in (0, 2):
            raise ConfigError(f"calibrate names two members, such as teacher+teacher-flip, got {calibrate!r}")
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
            counted = {"followed": warmup is not None, "log_temperature": bool(self.pair)}
            for name in (name for name, needed in counted.items() if needed):
                self.register_state(name, torch.zeros((), dtype=torch.float64, device=self.device))
        self.adapt(dict(self.model.named_parameters()), lr, optimizer, start=source)

    def step(self, x: Tensor) -> Tensor:
        """Adapt(θ', θ, θ_0, B, q), Algorithm 2 of the PETAL paper."""
        by = Predictions(self, x)
        answer = self.give(self.answered(by))   # first, so that `prediction` draws the same random numbers
        target = by.mean(self.target)                                                           # l. 3-5
        losses = [self.consistency(by[student], target).mean() for student in self.students]    # l. 6-7
        made = self.descend(torch.stack(losses).sum(), self.penalties(), self.after())          # l. 10-15
        if self.warmup is not None:
            self.followed += made
        if self.pair:
            self.temper(answer, *(by[name].detach() for name in self.pair))
        return answer

    def prediction(self, x: Tensor) -> Tensor:
        """The answer to a batch, from the weights as they are."""
        return self.answered(Predictions(self, x))

    def answered(self, by: "Predictions") -> Tensor:
        """The mean of the answer's members, at the temperature of now."""
        answer = by.mean(self.answer)
        return answer / self.log_temperature.exp().to(answer.dtype) if self.pair else answer

    def temper(self, answer: Tensor, one: Tensor, other: Tensor) -> None:
        """Move the temperature toward where the mean confidence is how often two predictions agree."""
        agree = (one.argmax(1) == other.argmax(1)).double().mean()
        excess = torch.nan_to_num(F.confidence(answer).double().mean() - agree)
        self.log_temperature = (self.log_temperature + TEMPER * excess).clamp(0, HOTTEST)

    def plain_prediction(self, x: Tensor) -> Tensor:
        """The answer to a batch without views."""
        return Predictions(self, x, views=False).mean(self.answer)

    @property
    def answered_by(self) -> tuple[str, ...]:
        """The networks of `answer`, the teacher first."""
        found = {"teacher" if name.startswith("teacher") else "model" for name in self.answer}
        return tuple(sorted(found, reverse=True))

    def taught(self, x: Tensor) -> Tensor:
        """The teacher's prediction y' (Alg. 2, l. 3-5): plain where the source is sure, over K views where it is not.

        Views are computed only if some sample needs them, and then for the whole batch.
        """
        self.views_used = False
        with torch.no_grad():
            if self.views == 0:
                return self.logits(self.teacher, x)
            needed = self.needs_views(x)
            self.views_used, everywhere = torch.stack([needed.any(), needed.all()]).tolist()
            if not self.views_used:
                return self.logits(self.teacher, x)
            views = self.views_of(x, self.augment, self.views, self.sharing)
            average = self.network(self.teacher).over(views, self.average)
            return average if everywhere else torch.where(needed[:, None], average, self.logits(self.teacher, x))

    def sampled(self, x: Tensor) -> Tensor:
        """The member "samples": of a method that has a posterior."""
        raise NotImplementedError

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
        average: list[After] = [Ema(self.teacher, self.decay())]
        return average if self.restore is None else [*average, PutBack(self.restore, self.source)]

    def describe(self) -> dict[str, str]:
        """What it does and with which settings."""
        augment = in_short(self.augment)
        learned = {"student": "the batch", "student-view": f"a view of it ({augment})"}
        views = f", over {self.views} views ({augment}) where the source is not sure" if self.views else ""
        window = "" if self.warmup is None else f" from a window of {self.warmup:g} steps on"
        return super().describe() | {
            "learns": f"from {' and '.join(learned[name] for name in self.students)}",
            "target": " + ".join(self.target) + views,
            "answer": " + ".join(self.answer) + (f", no surer than {' and '.join(self.pair)} agree" if self.pair else ""),
            "teacher": f"follows by {self.ema:g}{window}",
            "restore": "none" if self.restore is None else in_short(self.restore),
        }

    def vitals(self) -> dict[str, float]:
        """With the temperature of the answers, if they have one."""
        return super().vitals() | ({"temperature": float(self.log_temperature.exp())} if self.pair else {})

    def decay(self) -> float | Tensor:
        """What the teacher keeps of itself in this step: `ema`, or less in the first steps of a `warmup`."""
        return self.ema if self.warmup is None else (1 - 1 / (self.warmup + self.followed)).clamp(max=self.ema)


class Predictions(dict[str, Tensor]):
    """What student and teacher say of a batch, of its mirror images ("-flip") and of one view ("-view"), once asked for."""

    def __init__(self, adapter: MeanTeacher, x: Tensor, views: bool = True) -> None:
        super().__init__()
        self.adapter, self.x, self.views = adapter, x, views

    def __missing__(self, name: str) -> Tensor:
        adapter = self.adapter
        if name in BOTH and not adapter.views and {*BOTH} <= {*adapter.target, *adapter.answer}:
            self.update(zip(BOTH, self._by_teacher_on_both(), strict=True))
            return self[name]
        network, _, change = name.partition("-")
        self[name] = logits = self._logits(network, change, learns=name in adapter.students)
        return logits

    def _by_teacher_on_both(self) -> list[Tensor]:
        """The teacher's logits of the batch and of its mirror images, as two views: an engine runs these side by side."""
        adapter, both = self.adapter, iter((self.x, flipped(self.x)))
        views = adapter.views_of(self.x, lambda _: next(both), len(BOTH))
        adapter.views_used = False
        with torch.no_grad():
            return [logits.clone() for logits in adapter.network(adapter.teacher).each(views, range(len(BOTH)))]

    def mean(self, names: Sequence[str]) -> Tensor:
        """The mean over members, without gradients; of one member its logits as they are."""
        found = [self[name].detach() for name in names]
        return found[0] if len(found) == 1 else mean_over(found, len(found), self.adapter.average)

    def _logits(self, network: str, change: str, learns: bool) -> Tensor:
        adapter, x = self.adapter, self.x
        if network == "teacher" and not change and self.views:
            return adapter.taught(x)
        if network == "samples":
            return adapter.sampled(x)
        if change == "view":
            x = adapter.augmented(x, adapter.augment)
        if change == "flip":
            x = flipped(x)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return adapter.logits(adapter.teacher if network == "teacher" else adapter.model, x)


def members(option: str, names: str, known: Sequence[str] = MEMBERS) -> tuple[str, ...]:
    """The members of an average, from their names joined by "+"."""
    found = tuple(name.strip() for name in names.split("+")) if isinstance(names, str) else (names,)
    for name in found:
        check_choice(option, name, known)
    if len(set(found)) < len(found):
        raise ConfigError(f"{option} names a member twice: {names!r}")
    return found


def flipped(x: Tensor) -> Tensor:
    """Mirror images."""
    if x.dim() != 4:
        raise InputError(f"only images [N, C, H, W] have mirror images, not {list(x.shape)}: leave out what ends in -flip")
    return x.flip(-1)


def network_with(network: nn.Module, parameters: Mapping[str, Tensor] | None) -> nn.Module:
    """A frozen copy of a network, on the given parameter tensors themselves if there are any: no second copy is kept."""
    memo: dict[int, object] = {}
    if parameters is not None:
        for name, parameter in network.named_parameters():
            memo[id(parameter)] = nn.Parameter(parameters[name], requires_grad=False)
    with torch.inference_mode(False):
        return deepcopy(network, memo).requires_grad_(False)
