"""The source posterior q(θ): a Gaussian with a diagonal covariance (`petal.swag` fits one).

A posterior is data, not a module: tensors by parameter name, made once and never changed. PETAL starts at its mean, is
held near it by `log_prob`, and restores weights from it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from petal._files import replacing
from petal._frozen import Frozen
from petal.errors import PosteriorError
from petal.norm import unwrapped

FORMAT = "petal-posterior-1"


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Frozen):
    """q(θ) = N(mean, var + damping), keyed as `model.named_parameters()`.

    The tensors given are copied, so later training of the network they came from does not move the posterior.
    Variances below zero (an artefact of E[w²] - E[w]²) are clamped. `buffers` are the non-parameter tensors that belong
    to the mean, such as batch-norm statistics.

    >>> model = nn.Linear(2, 1)
    >>> q = DiagonalGaussian.isotropic(model, std=0.1)
    >>> abs(q.log_prob(model).item())
    0.0
    """

    mean: Mapping[str, Tensor]
    var: Mapping[str, Tensor]
    damping: float = 1e-6
    buffers: Mapping[str, Tensor] | None = field(default=None)

    def __post_init__(self) -> None:
        _check_names("the posterior's mean and variance", self.mean, self.var, "mean", "variance")
        if not self.mean:
            raise PosteriorError("a posterior needs at least one parameter, got none")
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise PosteriorError(f"damping must be a finite number >= 0, got {self.damping}")
        for name, value in [*self.mean.items(), *self.var.items()]:
            if not value.is_floating_point():
                raise PosteriorError(f"parameter {name!r} of a posterior must be floating point, got {value.dtype}")
            if not value.isfinite().all():
                raise PosteriorError(f"parameter {name!r} of the posterior has values that are not finite")
        freeze = object.__setattr__  # the dataclass is frozen: this is its constructor
        freeze(self, "mean", _frozen(self.mean))
        freeze(self, "var", MappingProxyType({name: _clamped(v) for name, v in self.var.items()}))
        freeze(self, "buffers", _frozen(self.buffers or {}))
        if self.damping == 0 and any(not (v > 0).all() for v in self.var.values()):
            raise PosteriorError("a variance of zero needs damping > 0: log_prob would divide by zero")

    @classmethod
    def isotropic(cls, model: nn.Module, std: float, damping: float = 0.0) -> "DiagonalGaussian":
        """The same `std` for every parameter of `model`, for users who have no training data to fit on."""
        if not (math.isfinite(std) and std > 0):
            raise PosteriorError(f"std must be a finite number > 0, got {std}")
        model = unwrapped(model)
        mean = {name: p.detach() for name, p in model.named_parameters()}
        var = {name: p.new_full((), std**2).expand(p.shape) for name, p in mean.items()}
        return cls(mean, var, damping=damping, buffers=dict(model.named_buffers()))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DiagonalGaussian":
        """This posterior on another device or in another precision; itself if it is there already."""
        like = next(iter(self.mean.values()))
        device, dtype = torch.device(device or like.device), dtype or like.dtype
        if all(v.device == device and v.dtype == dtype for v in [*self.mean.values(), *self.var.values()]):
            return self
        mean, var = ({k: v.to(device, dtype) for k, v in values.items()} for values in (self.mean, self.var))
        return self.moved(mean, var)

    def moved(self, mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> "DiagonalGaussian":
        """The same posterior on other tensors of the same values, which are taken as they are: no copy, no check."""
        like = next(iter(mean.values()))
        buffers = {
            k: v.to(like.device, like.dtype if v.is_floating_point() else None) for k, v in (self.buffers or {}).items()
        }
        other = object.__new__(DiagonalGaussian)
        for name, value in (("mean", mean), ("var", var), ("buffers", buffers)):
            object.__setattr__(other, name, MappingProxyType(dict(value)))
        object.__setattr__(other, "damping", self.damping)
        return other

    def check(self, model: nn.Module) -> None:
        """Raise a PosteriorError that names the differences unless names and shapes fit the network."""
        model = unwrapped(model)
        _check_names("the posterior and the network", self.mean, dict(model.named_parameters()), "posterior", "network")
        mine = self.buffers or {}
        shared = {name: buffer for name, buffer in model.named_buffers() if name in mine}
        _check_names("buffers", {name: mine[name] for name in shared}, shared, "posterior", "network")

    def log_prob(self, model: nn.Module) -> Tensor:
        """log q(θ) of the network's parameters up to its constant: -½ Σ (θ - mean)² / (var + damping).

        Gradients reach the network only; mean and variance never receive any.
        """
        parameters = dict(unwrapped(model).named_parameters())
        _check_names("the posterior and the network", self.mean, parameters, "posterior", "network")
        names = list(self.mean)
        return _LogProb.apply(  # type: ignore[no-any-return,no-untyped-call]
            [self.mean[n] for n in names], [self.var[n] for n in names], self.damping, *(parameters[n] for n in names)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tensors mean.*, var.*, buffer.* and the rest as metadata; the file appears whole or not at all."""
        tensors = {
            f"{kind}.{name}": value.contiguous().cpu()
            for kind, values in (("mean", self.mean), ("var", self.var), ("buffer", self.buffers or {}))
            for name, value in values.items()
        }
        metadata = {"format": FORMAT, "damping": json.dumps(self.damping)}
        try:
            with replacing(path) as temporary:
                save_file(tensors, temporary, metadata=metadata)
        except (OSError, SafetensorError) as error:  # safetensors reports a folder it cannot write to as its own
            raise PosteriorError(f"cannot write the posterior to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DiagonalGaussian":
        """Read what `save` wrote. Missing, extra and wrongly shaped tensors are refused by name."""
        groups: dict[str, dict[str, Tensor]] = {"mean": {}, "var": {}, "buffer": {}}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise PosteriorError(f"{path} is not a petal posterior: its format is {metadata.get('format')!r}")
                for key in file.keys():
                    kind, _, name = key.partition(".")
                    if kind not in groups or not name:
                        raise PosteriorError(f"{path} holds a tensor that is no part of a posterior: {key!r}")
                    groups[kind][name] = file.get_tensor(key)
            damping = float(json.loads(metadata["damping"]))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, PosteriorError):
                raise
            raise PosteriorError(f"cannot read a posterior from {path}: {error}") from error
        try:
            return cls(groups["mean"], groups["var"], damping=damping, buffers=groups["buffer"])
        except PosteriorError as error:
            raise PosteriorError(f"{path}: {error}") from error


class _LogProb(torch.autograd.Function):
    """log_prob with its gradient written out, so that nothing parameter-sized is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, mean: list[Tensor], var: list[Tensor], damping: float, *parameters: Tensor) -> Tensor:
        ctx.mean, ctx.var, ctx.damping = mean, var, damping
        ctx.save_for_backward(*parameters)
        terms = [((p - m).square_() / (v + damping)).sum() for p, m, v in zip(parameters, mean, var, strict=True)]
        return -0.5 * torch.stack(terms).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            (m - p).div_(v + ctx.damping).mul_(outer[0])
            for p, m, v in zip(ctx.saved_tensors, ctx.mean, ctx.var, strict=True)
        ]
        return None, None, None, *grads


def _frozen(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return MappingProxyType({name: value.detach().clone() for name, value in values.items()})


def _clamped(value: Tensor) -> Tensor:
    """A copy clamped at zero; a constant that is expanded over its shape stays one number in memory."""
    if value.numel() and not any(value.stride()):
        return value.detach().reshape(-1)[:1].clamp(min=0).reshape(()).expand(value.shape)
    return value.detach().clamp(min=0)


def _check_names(
    what: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor], left_name: str, right_name: str
) -> None:
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
