"""ASR: a reset when predictions collapse, of as many layers as the collapse asks for (Lim et al., 2026)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from petal import functional as F
from petal.methods.base import Adapter
from petal.methods.card import AFFINE, Card
from petal.methods.descent import Weights
from petal.methods.failures import with_memory
from petal.methods.inputs import check_number
from petal.methods.resets import forget, restart
from petal.methods.wrapper import Wrapper, beginning, check_learner
from petal.order import Keys


class ASR(Wrapper):
    """Adaptive and selective reset, around a method that adapts one network: ETA and ROID in the paper.

    After every batch e is the entropy of its mean logits, and phi the share of its images that the source, by batch
    statistics, labels otherwise. The reference level begins at ln(`level` · C) and follows e by
    m = 1 - `change` + `change` · phi. Where e falls below it the method is reset: its optimizer and declared state whole, of
    its parameters, in the order of the network, all but the first share max(`keep` - `slope` · (level - e), 0).

    What was learned until then is not lost: squared gradients F of the method's objective and the weights mu, averaged from
    one reset to the next, and over resets by `momentum`, hold the weights by lambda · sum F (theta - mu)^2, where
    lambda = `weight` · phi^2 of the batch before. A batch of which nothing is learned counts with a gradient of zero; in the
    released code with that of EATA's regulariser.

    In the released code (YonseiML/asr, 295718e) a reset around ROID goes to the wrong network: a mix of adapted and source
    weights is written into the frozen source that ROID pulls its weights to, and they themselves stay as they are. Here the
    adapted weights are reset and the source stays what it is. One forward of the source is added to the method's step, and
    nothing waits for the decision.
    """

    card = Card(
        title="ASR", year=2026, adapts=AFFINE, random=False,
        paper="Lim et al., When and where to reset matters for long-term test-time adaptation, ICLR 2026",
    )  # fmt: skip
    prefix = "asr."
    inner: ClassVar[bool] = True

    def __init__(
        self,
        adapter: Adapter,
        change: float = 0.15,
        weight: float = 5.0,
        level: float = 0.5,
        keep: float = 0.5,
        slope: float = 20.0,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(adapter)
        check_learner("ASR", adapter)
        for name, share in (("change", change), ("keep", keep), ("momentum", momentum)):
            check_number(name, share, low=0, high=1)
        check_number("level", level, low=1e-6, high=1)
        check_number("weight", weight, low=0)
        check_number("slope", slope, low=0)
        self.change, self.weight, self.begin, self.keep, self.slope = change, weight, level, keep, slope
        self.momentum = momentum
        self.source, self.start = beginning(adapter), adapter.origin()
        size = sum(value.numel() for value in self.start.values())
        with torch.inference_mode(False):
            self.order = torch.arange(len(self.start), device=adapter.device)
            self.memory = Memory(
                torch.zeros(2, size, device=adapter.device, dtype=adapter.dtype),
                torch.zeros(2, size, device=adapter.device, dtype=adapter.dtype),
                torch.zeros(4, device=adapter.device, dtype=torch.float64),
            )
        self.reset_own()
        assert adapter.descent is not None
        adapter.descent.standing = (*adapter.descent.standing, self.memory)

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """The method's step, and perhaps a reset."""
        if self.stopped:
            return self.predict(x, stream)
        return with_memory(self, lambda: self._adapted_to(x), x, stream)

    def _adapted_to(self, x: Tensor) -> Tensor:
        with self._guarded(x) as x, torch.enable_grad(), self.handing_on():
            for _ in range(self.steps):
                logits = self._run(self.step, x).detach()
                with torch.no_grad():
                    self._follow(logits)
            return self.corrected(logits)

    def step(self, x: Tensor) -> Tensor:
        """The method's step, after a look at what the source says and at the weights as they are."""
        assert self.descent is not None
        with torch.no_grad():
            self._labels = self.adapter.logits(self.source, x).argmax(1)
            self._before = flat(list(self.adapted.values()))
        self.descent.made = self.memory.squares = None
        return self.adapter.step(x)

    def _follow(self, logits: Tensor) -> None:
        """What the answer to a batch says about a collapse, and what follows from it."""
        assert self.descent is not None
        m, made = self.memory, self.descent.made
        known = logits.isfinite().all()
        m.sums[0] += 0.0 if made is None or m.squares is None else torch.where(made, m.squares, 0.0)
        m.sums[1] += torch.where(known, self._before, 0.0)
        _, _, level, count = m.numbers.unbind()
        entropy = F.entropy(logits.mean(0, keepdim=True))[0].double()
        flips = (logits.argmax(1) != self._labels).double().mean()
        first = math.log(self.begin * logits.shape[1])
        level = torch.where(level.isnan(), first, level)
        due = known & (entropy < level)
        count = count + known
        m.consolidate(due, count, self.momentum)
        kept = (self.keep - self.slope * (level - entropy)).clamp(min=0) * len(self.start)
        restart(self.adapter, self.start, due, which=self.order >= kept)
        forget(self.adapter, due)
        share = 1 - self.change + self.change * flips
        level = torch.where(due, first, torch.where(known, share * level + (1 - share) * entropy, level))
        weight = torch.where(known, self.weight * flips.square(), m.numbers[0])
        m.numbers.copy_(torch.stack([weight, m.numbers[1], level, torch.where(due, 0.0, count)]))

    @property
    def resets(self) -> int:
        """Resets so far; waits for the device."""
        return int(self.memory.numbers[1])

    def describe(self) -> dict[str, str]:
        """What the method does, and that it is reset."""
        return self.adapter.describe() | {"asr": "resets when predictions collapse"}

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """Sums since the last reset, what is held on to, and lambda, resets, level and number of batches."""
        return {name: getattr(self.memory, name).clone() for name in ("sums", "held", "numbers")}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        for name, value in state.items():
            getattr(self.memory, name).copy_(value)

    def reset_own(self) -> None:
        """Nothing seen, nothing held on to."""
        for name in ("sums", "held", "numbers"):
            getattr(self.memory, name).zero_()
        self.memory.numbers[2] = math.nan


@dataclass(eq=False)
class Memory:
    """What the method's gradients were, and the penalty on leaving what was learned: 2 · lambda · F (theta - mu).

    `sums` are those of squared gradients and of weights since the last reset [2, P], `held` are F and mu [2, P], `numbers`
    are lambda, the resets so far, the level, and the batches since the last one. The parameters lie one after the other.
    """

    sums: Tensor
    held: Tensor
    numbers: Tensor
    squares: Tensor | None = None       # of the last gradient, without this penalty [P]
    elementwise = False

    def add_(self, weights: Weights) -> None:
        """Look at the gradient of the objective, and add that of the penalty."""
        gradients = weights.gradients
        self.squares = flat(gradients).square()
        weight = (2 * self.numbers[0]).to(self.held.dtype)
        pull = weight * self.held[0] * (flat(weights.values) - self.held[1])
        parts = torch.split(pull, [gradient.numel() for gradient in gradients])
        torch._foreach_add_(gradients, [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)])

    def consolidate(self, due: Tensor, count: Tensor, momentum: float) -> None:
        """Where a reset is due, take the means since the last one into what is held, and begin anew."""
        share = (due * (1 - momentum * (self.numbers[1] > 0).double())).to(self.held.dtype)
        self.held.lerp_(self.sums / count.clamp(min=1).to(self.sums.dtype), share)
        self.sums.masked_fill_(due, 0)
        self.numbers[1] += due


def flat(values: list[Tensor]) -> Tensor:
    """Tensors one after the other [P]."""
    return torch.cat([value.detach().flatten() for value in values])
