"""The weights that adapt, and everything that happens to them after a gradient: plain torch.

A step is a loss, penalties that add to its gradient, an optimizer's step, and operations that follow it. Penalties and
operations are small values that work on `Weights`: lists of tensors in one order. `petal.accelerate` runs the same values
over one flat tensor, and those that it knows together in one pass.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.errors import PetalWarning
from petal.posterior import Posterior
from petal.restore import Restore

Values = nn.Module | Mapping[str, Tensor]


class Weights:
    """The adapted parameters as a list, with their gradients, and other tensors of the same names in the same order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
        self.parameters, self.generator = parameters, generator

    @property
    def values(self) -> list[Tensor]:
        """The tensors to change in place, each with its `grad`."""
        return list(self.parameters.values())

    @property
    def gradients(self) -> list[Tensor]:
        """Their gradients, to change in place: zeros where a parameter took no part in the loss."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def like(self, values: Values) -> list[Tensor]:
        """A network's parameters, or the tensors of a mapping, with the names of the adapted ones."""
        named = dict(values.named_parameters()) if isinstance(values, nn.Module) else values
        return [named[name] for name in self.parameters]


class Penalty(Protocol):
    """A term of the objective, by its gradient."""

    @property
    def elementwise(self) -> bool:
        """True if one flat tensor of all weights will do for the list."""
        ...

    def add_(self, weights: Weights) -> None:
        """Add the gradient of the term."""
        ...


class After(Protocol):
    """What happens to the weights after the optimizer's step."""

    @property
    def elementwise(self) -> bool:
        """True if one flat tensor of all weights will do for the list."""
        ...

    def prepare(self, weights: Weights) -> Any:
        """What has to be known from before the optimizer's step, such as gradients."""
        ...

    def apply_(self, weights: Weights, prepared: Any) -> Tensor | None:
        """Change the weights, or others after them. Returns how many weights it put back, if that is its business."""
        ...


@dataclass(frozen=True, eq=False)
class Gaussian:
    """-weight · log N(θ; mean, var + damping), the self-training prior (PETAL, Alg. 2, l. 10)."""

    mean: Values
    var: Mapping[str, Tensor]
    damping: float
    weight: float
    elementwise = True

    def add_(self, weights: Weights) -> None:
        """weight · (θ - mean) / (var + damping)."""
        rows = zip(weights.gradients, weights.values, weights.like(self.mean), weights.like(self.var), strict=True)
        for gradient, value, mean, var in rows:
            gradient.addcdiv_(value - mean, var + self.damping, value=self.weight)


@dataclass(frozen=True, eq=False)
class Prior:
    """-weight · log q(θ) of any posterior, by its score."""

    posterior: Posterior
    weight: float
    elementwise = False

    def add_(self, weights: Weights) -> None:
        """-weight · ∇ log q(θ)."""
        score = self.posterior.score(weights.parameters)
        for name, gradient in zip(weights.parameters, weights.gradients, strict=True):
            gradient.sub_(score[name], alpha=self.weight)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """weight · Σ information (θ - origin)², which holds what the source needs (EATA, eq. 8)."""

    information: Mapping[str, Tensor]
    origin: Values
    weight: float
    elementwise = True

    def add_(self, weights: Weights) -> None:
        """2 · weight · information · (θ - origin)."""
        rows = zip(weights.gradients, weights.values, weights.like(self.information), weights.like(self.origin), strict=True)
        for gradient, value, information, origin in rows:
            gradient.addcmul_(information, value - origin, value=2 * self.weight)


@dataclass(frozen=True, eq=False)
class Ema:
    """average ← decay · average + (1 - decay) · θ: how a teacher follows. A decay that changes lies on the device."""

    average: Values
    decay: float | Tensor

    @property
    def elementwise(self) -> bool:
        """For a network: a mapping's own tensors are to move, and not a flat copy of them."""
        return isinstance(self.average, nn.Module)

    def prepare(self, weights: Weights) -> None:
        """Nothing."""

    def apply_(self, weights: Weights, prepared: None) -> None:
        """Move the average."""
        F.ema_(weights.like(self.average), weights.values, float(self.decay))


@dataclass(frozen=True, eq=False)
class Pull:
    """θ ← (1 - share) · θ + share · toward: weight ensembling (ROID)."""

    toward: Values
    share: float
    elementwise = True

    def prepare(self, weights: Weights) -> None:
        """Nothing."""

    def apply_(self, weights: Weights, prepared: None) -> None:
        """Move the weights."""
        F.ema_(weights.values, weights.like(self.toward), 1.0 - self.share)


@dataclass(frozen=True, eq=False)
class Scale:
    """Each tensor goes its share of the optimizer's step: rates by `shares` [tensors], on the device (PALM)."""

    shares: Tensor
    elementwise = False

    def prepare(self, weights: Weights) -> list[Tensor]:
        """Where the step begins."""
        return [value.detach().clone() for value in weights.values]

    def apply_(self, weights: Weights, prepared: list[Tensor]) -> None:
        """Shorten or lengthen the step."""
        for value, before, share in zip(weights.values, prepared, self.shares, strict=True):
            value.copy_(before + share * (value - before))


@dataclass(frozen=True, eq=False)
class Limit:
    """The optimizer's step goes no further than `share` of the weights' length, all of them together: a bounded step.

    What a batch can do to the weights has a limit then, whatever is in it. It comes before averages (`Descent.first`).
    """

    share: float
    elementwise = True

    def prepare(self, weights: Weights) -> list[Tensor]:
        """Where the step begins."""
        return [value.detach().clone() for value in weights.values]

    def apply_(self, weights: Weights, prepared: list[Tensor]) -> None:
        """Shorten the step if it is too long."""
        length = torch.stack(torch._foreach_norm(prepared)).norm()
        way = torch.stack(torch._foreach_norm(torch._foreach_sub(weights.values, prepared))).norm()
        kept = (self.share * length / way.clamp(min=1e-30)).clamp(max=1)
        for value, before in zip(weights.values, prepared, strict=True):
            value.copy_(torch.lerp(before, value, kept.to(value.dtype)))


@dataclass(frozen=True, eq=False)
class Kalman:
    """Weights filtered over time: a hidden state follows them by a Kalman gain, and they move toward it (CMF).

    Of the hidden state goes 1 - `keep` to the source before every look at the weights, and its `variance`, one number that
    changes in place, grows by `noise`. What is seen of the weights has the variance 1 - `noise`. As in the released code the
    hidden state keeps `floor` of itself at least, and all where the gain is below 1e-4.
    """

    hidden: Values
    source: Values
    variance: Tensor
    noise: float
    keep: float
    share: float
    floor: float = 0.89
    elementwise = True

    def prepare(self, weights: Weights) -> None:
        """Nothing."""

    def apply_(self, weights: Weights, prepared: None) -> None:
        """Move the hidden state toward the source, then toward the weights, then the weights toward it."""
        hidden = weights.like(self.hidden)
        F.ema_(hidden, weights.like(self.source), self.keep)
        self.variance.mul_(self.keep**2).add_(self.noise)
        kept = ((1 - self.noise) / (self.variance + 1 - self.noise)).clamp(min=self.floor)
        kept = torch.where(kept < 0.9999, kept, 1.0)
        self.variance.mul_(kept)
        for state, value in zip(hidden, weights.values, strict=True):
            state.lerp_(value, (1 - kept).to(value.dtype))
        F.ema_(weights.values, hidden, 1.0 - self.share)


@dataclass(frozen=True, eq=False)
class PutBack:
    """θ ← m θ_0 + (1 - m) θ with the masks m of a restore (Alg. 2, l. 13-15); optimizer and teacher keep what they have."""

    restore: Restore
    source: Values

    @property
    def elementwise(self) -> bool:
        """As the restore says of itself; one of the user's own is given the parameters one by one."""
        return bool(getattr(self.restore, "elementwise", False))

    def prepare(self, weights: Weights) -> list[Tensor]:
        """The masks, by the gradients of this step."""
        return self.restore.masks(weights.values, weights.generator)

    def apply_(self, weights: Weights, prepared: list[Tensor]) -> Tensor:
        """Put the masked weights back."""
        F.restore_(weights.values, weights.like(self.source), prepared)
        return sum((mask.sum() for mask in prepared), torch.zeros((), dtype=torch.int64, device=prepared[0].device))


class Descent:
    """Steps down a loss. What is not finite is not learned from, and counted in `skipped`.

    `standing` are penalties of every step, after those that the step itself has, and `first` what comes first after it: for
    what goes around a method. `made` says of the last step whether it was made, by one boolean on the device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, generator: torch.Generator):
        self.parameters, self.optimizer = dict(parameters), optimizer
        self.weights = self.whole = Weights(self.parameters, generator)
        self.skips = 0
        self.restored: Tensor | float = 0.0
        self.standing: tuple[Penalty, ...] = ()
        self.first: tuple[After, ...] = ()
        self.made: Tensor | None = None
        self.moving = False                 # the weights are being changed: what fails now leaves them in between
        self._kept: list[Tensor] | None = None

    @property
    def skipped(self) -> int:
        """Updates not made because the loss or a gradient was not finite."""
        return self.skips

    @skipped.setter
    def skipped(self, value: int) -> None:
        self.skips = value

    def __call__(
        self, loss: Tensor, penalties: Sequence[Penalty] = (), after: Sequence[After] = (), when: Tensor | bool = True
    ) -> Tensor:
        """One step on a loss and its penalties, then what comes after it; none if not all is finite.

        `when`, one boolean that may lie on the device, says whether there is anything to learn from: without it nothing
        moves, and nothing is counted. Returns one boolean on the device: true if the step was made.
        """
        self.made = made = self.gradient(loss, (*penalties, *self.standing), when)
        self._put_back()
        self.moving = True
        self.finish(made, (*self.first, *after))
        self.moving = False
        return made

    def gradient(self, loss: Tensor, penalties: Sequence[Penalty] = (), when: Tensor | bool = True) -> Tensor:
        """Gradients of the adapted parameters; true, on the device, if they may be used."""
        learn = bool(when)
        if learn:
            loss.backward(inputs=list(self.parameters.values()))  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for penalty in penalties:
                    penalty.add_(self.weights)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        finite = learn and bool(F.all_finite([loss, *gradients]))
        if learn and not finite:
            self.skips += 1
            if self.skips == 1 and self.weights.values[0].dtype == torch.float16:
                warnings.warn(
                    "an update is left out, since its loss or gradient leaves the range of float16; more may follow, and "
                    "`skipped` counts them: give the method network.float() (an engine multiplies in float16 by itself) or "
                    "network.bfloat16()", PetalWarning, stacklevel=2,
                )  # fmt: skip
        return torch.tensor(finite, device=loss.device)

    def finish(self, made: Tensor, after: Sequence[After]) -> None:
        """The optimizer's step and what comes after it, if the gradients may be used; then they are gone."""
        self.restored = 0.0
        if bool(made):
            self.update(after)
        self.optimizer.zero_grad()

    def update(self, after: Sequence[After]) -> None:
        """The optimizer's step and the operations."""
        with torch.no_grad():
            prepared = self.prepare(after)
            self.optimizer.step()
            self.apply(prepared)

    def prepare(self, after: Sequence[After]) -> list[tuple[After, Weights, Any]]:
        """What operations have to know from before the optimizer's step, with the weights that they work on."""
        lists = [self.whole if operation.elementwise else self.weights for operation in after]
        return [(operation, weights, operation.prepare(weights)) for operation, weights in zip(after, lists, strict=True)]

    def apply(self, prepared: Sequence[tuple[After, Weights, Any]]) -> None:
        """The operations, after the optimizer's step."""
        for operation, weights, found in prepared:
            count = operation.apply_(weights, found)
            if count is not None:
                self.restored = count / sum(value.numel() for value in weights.values)

    @contextmanager
    def perturbed(self, loss: Tensor, radius: float, when: Tensor | bool = True) -> Iterator[Tensor]:
        """In here the weights lie `radius` away, where the loss is highest to first order: sharpness-aware steps (SAM).

        A step taken in here has the gradient of there and starts from the weights of before. With `when` false, or a
        gradient that is not finite, they are not moved away. Gives one boolean on the device: true if they were.
        """
        made = self.gradient(loss, when=when)
        with torch.no_grad():
            values, gradients = self.whole.values, self.whole.gradients
            size = torch.stack(torch._foreach_norm(gradients)).norm()
            scale = torch.where(made, radius / (size + 1e-12), torch.zeros_like(size))
            self._kept = [value.detach().clone() for value in values]
            for value, gradient in zip(values, gradients, strict=True):
                value.add_(torch.nan_to_num(gradient * scale, nan=0.0, posinf=0.0, neginf=0.0))
        self.clear()
        try:
            yield made
        finally:
            self._put_back()

    def restart(
        self,
        start: Values,
        when: Tensor | bool = True,
        fresh: Callable[[], torch.optim.Optimizer] | None = None,
        which: Tensor | None = None,
    ) -> None:
        """Where `when`, one boolean that may lie on the device, is true: weights as in `start`, and a `fresh` optimizer.

        `which`, a boolean for each parameter in their order, says which ones go back; without it all do.
        """
        if bool(when):
            with torch.no_grad():
                rows = zip(self.weights.values, self.weights.like(start), strict=True)
                for number, (value, first) in enumerate(rows):
                    value.copy_(first if which is None else torch.where(which[number], first, value))
            self.optimizer = self.optimizer if fresh is None else fresh()

    def clear(self) -> None:
        """Forget the gradients there are."""
        self.optimizer.zero_grad()

    def release(self) -> None:
        """Leave the optimizer's state as torch keeps it."""

    def _put_back(self) -> None:
        if self._kept is not None:
            with torch.no_grad():
                for value, kept in zip(self.whole.values, self._kept, strict=True):
                    value.copy_(kept)
            self._kept = None
