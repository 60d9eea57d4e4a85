"""What PETAL asks of a posterior, and the one with a diagonal covariance (`petal.fit_swag`, `petal.fit_laplace`)."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from petal._frozen import Frozen
from petal.errors import PosteriorError
from petal.norm import unwrapped
from petal.posterior.files import read, write

Named = Mapping[str, Tensor]
G = TypeVar("G", bound="Gaussian")


@runtime_checkable
class Posterior(Protocol):
    """What PETAL asks of q(θ), by parameter name as `model.named_parameters()`; one of your own will do.

    `buffers` are the non-parameter tensors that belong to the mean. `confidence` is what the source's confidence on its own
    images exceeds but for 5 %, if that is known.
    """

    @property
    def mean(self) -> Named:
        """Where a student starts."""
        ...

    @property
    def buffers(self) -> Named | None:
        """Such as batch-norm statistics."""
        ...

    @property
    def damping(self) -> float:
        """What is added to every variance."""
        ...

    @property
    def confidence(self) -> float | None:
        """For the gate's confidence="auto"."""
        ...

    def check(self, model: nn.Module) -> None:
        """Raise a PosteriorError unless it is of this network."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> "Posterior":
        """The same on another device or in another precision."""
        ...

    def variance(self) -> dict[str, Tensor]:
        """The variance of every weight by itself, without the damping."""
        ...

    def score(self, parameters: Named) -> dict[str, Tensor]:
        """The gradient of log q at these parameters."""
        ...

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters drawn from it."""
        ...


@dataclass(frozen=True, eq=False)
class Gaussian(Frozen):
    """What Gaussians have in common: a mean, variances with a damping that is added to them, and the file they lie in."""

    form: ClassVar[str]                                     # what its file says that it is
    groups: ClassVar[tuple[str, ...]] = ("mean", "var")     # fields that hold tensors by parameter name

    mean: Named
    var: Named
    damping: float = 1e-6
    buffers: Named | None = field(default=None)
    confidence: float | None = field(default=None)

    def __post_init__(self) -> None:
        _check_names("the posterior's mean and variance", self.mean, self.var, "mean", "variance")
        if not self.mean:
            raise PosteriorError("a posterior needs at least one parameter, got none")
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise PosteriorError(f"damping must be a finite number >= 0, got {self.damping}")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise PosteriorError(f"the source's confidence lies in [0, 1], got {self.confidence}")
        for name, value in [item for group in self.groups for item in getattr(self, group).items()]:
            if not value.is_floating_point():
                raise PosteriorError(f"parameter {name!r} of a posterior must be floating point, got {value.dtype}")
            if not value.isfinite().all():
                raise PosteriorError(f"parameter {name!r} of the posterior has values that are not finite")
        freeze = object.__setattr__  # the dataclass is frozen: this is its constructor
        for group in (*self.groups, "buffers"):
            copied = _clamped if group == "var" else _copied
            freeze(self, group, MappingProxyType({name: copied(v) for name, v in (getattr(self, group) or {}).items()}))
        if self.damping == 0 and any(not (v > 0).all() for v in self.var.values()):
            raise PosteriorError("a variance of zero needs damping > 0: log_prob would divide by zero")

    def score(self, parameters: Named) -> dict[str, Tensor]:
        """The gradient of log q at these parameters."""
        raise NotImplementedError

    def to(self: G, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> G:
        """This posterior on another device or in another precision; itself if it is there already."""
        like = next(iter(self.mean.values()))
        device, dtype = torch.device(device or like.device), dtype or like.dtype
        every = {group: getattr(self, group) for group in self.groups}
        if all(v.device == device and v.dtype == dtype for values in every.values() for v in values.values()):
            return self
        return self.moved(**{g: {name: v.to(device, dtype) for name, v in values.items()} for g, values in every.items()})

    def moved(self: G, **groups: Named) -> G:
        """The same posterior on other tensors of the same values, which are taken as they are: no copy, no check."""
        other: G = object.__new__(type(self))
        vars(other).update(vars(self) | {name: MappingProxyType(dict(values)) for name, values in groups.items()})
        like = next(iter(other.mean.values()))
        buffers = {
            k: v.to(like.device, like.dtype if v.is_floating_point() else None) for k, v in (self.buffers or {}).items()
        }
        vars(other)["buffers"] = MappingProxyType(buffers)
        return other

    def check(self, model: nn.Module) -> None:
        """Raise a PosteriorError that names the differences unless names and shapes fit the network."""
        model = unwrapped(model)
        _check_names("the posterior and the network", self.mean, dict(model.named_parameters()), "posterior", "network")
        mine = self.buffers or {}
        shared = {name: buffer for name, buffer in model.named_buffers() if name in mine}
        _check_names("buffers", {name: mine[name] for name in shared}, shared, "posterior", "network")

    def log_prob(self, model: nn.Module) -> Tensor:
        """log q(θ) of the network's parameters up to its constant: -½ (θ - mean)ᵀ Σ⁻¹ (θ - mean).

        Gradients reach the network only; mean and variance never receive any.
        """
        parameters = dict(unwrapped(model).named_parameters())
        _check_names("the posterior and the network", self.mean, parameters, "posterior", "network")
        return _LogProb.apply(self, *(parameters[n] for n in self.mean))  # type: ignore[no-any-return,no-untyped-call]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tensors mean.*, var.*, buffer.* and the rest as metadata; the file appears whole or not at all."""
        groups = {group.removesuffix("s"): getattr(self, group) for group in (*self.groups, "buffers")}
        known = {} if self.confidence is None else {"confidence": self.confidence}
        write(path, self.form, groups, {"damping": self.damping} | known)

    @classmethod
    def load(cls: type[G], path: str | os.PathLike[str]) -> G:
        """Read what `save` wrote. Missing, extra and wrongly shaped tensors are refused by name."""
        names = {group.removesuffix("s"): group for group in (*cls.groups, "buffers")}
        found, about = read(path, cls.form, tuple(names))
        try:
            known = {key: float(about[key]) for key in ("damping", "confidence") if key == "damping" or key in about}
        except (KeyError, TypeError, ValueError) as error:
            raise PosteriorError(f"cannot read a posterior from {path}: {error}") from error
        try:
            fields: dict[str, Any] = {names[kind]: values for kind, values in found.items()} | known
            return cls(**fields)
        except PosteriorError as error:
            raise PosteriorError(f"{path}: {error}") from error


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Gaussian):
    """q(θ) = N(mean, var + damping), keyed as `model.named_parameters()`.

    The tensors given are copied, so later training of the network they came from does not move the posterior.
    Variances below zero (an artefact of E[w²] - E[w]²) are clamped. `buffers` are the non-parameter tensors that belong
    to the mean, such as batch-norm statistics; `confidence` is what the source's confidence on its own images exceeds but
    for 5 %, if that is known.

    >>> model = nn.Linear(2, 1)
    >>> q = DiagonalGaussian.isotropic(model, std=0.1)
    >>> abs(q.log_prob(model).item())
    0.0
    """

    form = "petal-posterior-1"

    @classmethod
    def isotropic(cls, model: nn.Module, std: float, damping: float = 0.0) -> "DiagonalGaussian":
        """The same `std` for every parameter of `model`, for users who have no training data to fit on."""
        if not (math.isfinite(std) and std > 0):
            raise PosteriorError(f"std must be a finite number > 0, got {std}")
        model = unwrapped(model)
        mean = {name: p.detach() for name, p in model.named_parameters()}
        var = {name: p.new_full((), std**2).expand(p.shape) for name, p in mean.items()}
        return cls(mean, var, damping=damping, buffers=dict(model.named_buffers()))

    def variance(self) -> dict[str, Tensor]:
        """The variance of every weight, without the damping."""
        return dict(self.var)

    def score(self, parameters: Named) -> dict[str, Tensor]:
        """The gradient of log q at these parameters: (mean - θ) / (var + damping)."""
        return {n: (self.mean[n] - p).div_(self.var[n] + self.damping) for n, p in parameters.items()}

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters drawn from it, damping included."""
        return {n: m + (self.var[n] + self.damping).sqrt() * noise_like(m, generator) for n, m in self.mean.items()}


class _LogProb(torch.autograd.Function):
    """log_prob with its gradient written out, so that nothing parameter-sized is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, posterior: Gaussian, *parameters: Tensor) -> Tensor:
        ctx.posterior = posterior
        ctx.save_for_backward(*parameters)
        named = dict(zip(posterior.mean, parameters, strict=True))
        terms = [((named[n] - posterior.mean[n]) * score).sum() for n, score in posterior.score(named).items()]
        return 0.5 * torch.stack(terms).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scores = ctx.posterior.score(dict(zip(ctx.posterior.mean, ctx.saved_tensors, strict=True)))
        return None, *(score.mul_(outer[0]) for score in scores.values())


def noise_like(value: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise."""
    return torch.randn(value.shape, device=value.device, dtype=value.dtype, generator=generator)


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone()


def _clamped(value: Tensor) -> Tensor:
    """A copy clamped at zero; a constant that is expanded over its shape stays one number in memory."""
    if value.numel() and not any(value.stride()):
        return value.detach().reshape(-1)[:1].clamp(min=0).reshape(()).expand(value.shape)
    return value.detach().clamp(min=0)


def _check_names(what: str, left: Named, right: Named, left_name: str, right_name: str) -> None:
    problems = [f"{name!r} is only in the {left_name}" for name in left if name not in right]
    problems += [f"{name!r} is only in the {right_name}" for name in right if name not in left]
    problems += [
        f"{name!r} is {list(left[name].shape)} in the {left_name} and {list(right[name].shape)} in the {right_name}"
        for name in left
        if name in right and left[name].shape != right[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise PosteriorError(f"{what} do not fit: {shown}")
