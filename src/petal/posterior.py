"""The source posterior q(θ): a Gaussian with a diagonal covariance, and how to fit one along the SGD path (SWAG-D).

A posterior is data, not a module: tensors by parameter name, made once and never changed. PETAL starts at its mean, is
held near it by `log_prob`, and gets weights back from it.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from petal._files import replacing
from petal._random import random_state, set_random_state
from petal.errors import PosteriorError
from petal.norm import batch_norms, unwrapped

log = logging.getLogger(__name__)

FORMAT = "petal-posterior-1"


@dataclass(frozen=True, eq=False)
class DiagonalGaussian:
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
                for key in file.keys():  # noqa: SIM118 (not a dict)
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


@dataclass(frozen=True)
class FitProgress:
    """Where `fit_swag` stands, after every batch: numbers count from 1, `batches` is None if the loader can't say."""

    epoch: int
    epochs: int
    batch: int
    batches: int | None
    loss: float
    snapshots: int


class Moments:
    """Streaming mean and variance of parameter snapshots, by Welford's update in float64: never negative.

    >>> moments = Moments()
    >>> for value in (1.0, 3.0):
    ...     moments.add({"w": torch.tensor([value])})
    >>> moments.mean()["w"].item(), moments.var()["w"].item()
    (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def add(self, snapshot: Mapping[str, Tensor]) -> None:
        """Take one more snapshot into account."""
        self.count += 1
        for name, tensor in snapshot.items():
            value = tensor.detach().double()
            if self.count == 1:
                self._mean[name], self._squares[name] = value.clone(), torch.zeros_like(value)
                continue
            difference = value - self._mean[name]
            self._mean[name].add_(difference, alpha=1 / self.count)
            self._squares[name].addcmul_(difference, value - self._mean[name])

    def mean(self) -> dict[str, Tensor]:
        """Mean of the snapshots, float64."""
        return {name: value.clone() for name, value in self._mean.items()}

    def var(self) -> dict[str, Tensor]:
        """Variance over n (not n - 1) of the snapshots, float64."""
        return {name: squares / self.count for name, squares in self._squares.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors from which `load_state_dict` continues exactly."""
        state = {f"mean.{name}": value.clone() for name, value in self._mean.items()}
        state |= {f"squares.{name}": value.clone() for name, value in self._squares.items()}
        return state | {"count": torch.tensor(self.count)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.count = int(state["count"])
        self._mean = {key[5:]: value.clone() for key, value in state.items() if key.startswith("mean.")}
        self._squares = {key[8:]: value.clone() for key, value in state.items() if key.startswith("squares.")}


def snapshot_batches(batches: int, per_epoch: int) -> list[int]:
    """After which batches of an epoch (counted from 1) a snapshot is taken: evenly spaced, the last one at the end.

    >>> snapshot_batches(10, 4)
    [3, 5, 8, 10]
    """
    return [math.ceil(batches * (i + 1) / per_epoch) for i in range(per_epoch)]


def fit_swag(
    model: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    epochs: int = 5,
    lr: float = 8e-4,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    snapshots_per_epoch: int = 1,
    train_batch_norm: bool = False,
    damping: float = 1e-6,
    autocast: torch.dtype | None = None,
    progress: Callable[[FitProgress], None] | None = None,
    on_snapshot: Callable[[dict[str, Tensor]], None] | None = None,
    on_epoch: Callable[[int, dict[str, Tensor]], None] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> DiagonalGaussian:
    """Fit SWAG-diagonal: continue the training of a copy of `model` by SGD and take the moments of its path.

    Defaults are the paper's for CIFAR; for ImageNet it uses epochs=2, snapshots_per_epoch=4, lr=1e-4. `loader` is any
    iterable of (images, labels) that can be run through `epochs` times. Batch-norm statistics stay as they are (their
    affine parameters are trained like all others); with train_batch_norm=True they are trained along and, at the end,
    computed anew for the mean by a pass over the loader. `autocast` is a dtype for mixed precision. `progress` is called
    after every batch, `on_snapshot` with every snapshot's parameters. `on_epoch` is called after every epoch with its
    number and a state, flat tensors; given as `state` to a call with the same arguments, and a loader that goes on with the
    next epoch, the fit continues from there exactly.
    """
    for name, value in (("epochs", epochs), ("snapshots_per_epoch", snapshots_per_epoch)):
        if value < 1:
            raise PosteriorError(f"{name} must be at least 1, got {value}")
    if not (math.isfinite(lr) and lr > 0):
        raise PosteriorError(f"lr must be a finite number > 0, got {lr}")
    batches = _length(loader)
    if batches is None and snapshots_per_epoch > 1:
        raise PosteriorError("several snapshots an epoch need a loader with a length; use snapshots_per_epoch=1")
    if batches is not None and batches < snapshots_per_epoch:
        raise PosteriorError(f"{snapshots_per_epoch} snapshots an epoch do not fit into {batches} batches an epoch")

    model = unwrapped(model)
    network = deepcopy(model).requires_grad_(True).train()
    if not train_batch_norm:
        for _, layer in batch_norms(network):
            layer.eval()
    parameters = dict(network.named_parameters())
    if not parameters:
        raise PosteriorError("the network has no parameters: there is nothing to fit")
    device = next(iter(parameters.values())).device
    optimizer = torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    moments = Moments()
    due = set(snapshot_batches(batches, snapshots_per_epoch)) if batches is not None else set()

    def snapshot() -> None:
        moments.add(parameters)
        if on_snapshot is not None:
            on_snapshot({name: p.detach().clone() for name, p in parameters.items()})

    done = 0 if state is None else _continue_swag(state, network, optimizer, moments)
    for epoch in range(done + 1, epochs + 1):
        number = 0
        for number, batch in enumerate(loader, start=1):
            x, y = _images_and_labels(batch, device, f"batch {number} of epoch {epoch}")
            with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits = network(x)
                _check_labels(y, logits, f"batch {number} of epoch {epoch}")
                loss = nn.functional.cross_entropy(logits, y)
            if not loss.isfinite():
                raise PosteriorError(
                    f"the loss is {loss.item()} in batch {number} of epoch {epoch}: check the data, or lower lr={lr}"
                )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number in due:
                snapshot()
            if progress is not None:
                progress(FitProgress(epoch, epochs, number, batches, loss.item(), moments.count))
        if number == 0:
            raise PosteriorError(f"the loader gave no batches in epoch {epoch}")
        if batches is None:
            snapshot()
        elif number != batches:
            raise PosteriorError(f"the loader says that it has {batches} batches and gave {number} in epoch {epoch}")
        log.debug("swag epoch %d of %d done, %d snapshots", epoch, epochs, moments.count)
        if on_epoch is not None:
            on_epoch(epoch, _swag_state(epoch, network, optimizer, moments))

    like = dict(model.named_parameters())
    mean = {name: value.to(like[name].dtype) for name, value in moments.mean().items()}
    var = {name: value.to(like[name].dtype) for name, value in moments.var().items()}
    if train_batch_norm:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(mean[name])
        torch.optim.swa_utils.update_bn(loader, network, device=device)
        counts = [layer.num_batches_tracked for _, layer in batch_norms(network) if layer.num_batches_tracked is not None]
        if counts and not any(counts):
            raise PosteriorError("the loader gave no batches for the mean's batch-norm statistics: it ran through only once")
    return DiagonalGaussian(mean, var, damping=damping, buffers=dict(network.named_buffers()))


def _swag_state(
    epoch: int, network: nn.Module, optimizer: torch.optim.Optimizer, moments: Moments
) -> dict[str, Tensor]:
    """Everything that a fit has changed so far, torch's random numbers included: dropout draws from them."""
    tensors = {f"network.{name}": value.detach() for name, value in network.state_dict().items()}
    tensors |= {f"moments.{name}": value for name, value in moments.state_dict().items()}
    for name, parameter in network.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{name}"] = momentum
    return tensors | random_state() | {"epoch": torch.tensor(epoch)}


def _continue_swag(
    state: Mapping[str, Tensor], network: nn.Module, optimizer: torch.optim.Optimizer, moments: Moments
) -> int:
    """Put everything where `_swag_state` found it; returns the number of epochs done."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    device = next(network.parameters()).device
    try:
        network.load_state_dict(part("network."))
        moments.load_state_dict({key: value.to(device) for key, value in part("moments.").items()})
        momentum = part("momentum.")
        for name, parameter in network.named_parameters():
            if name in momentum:
                optimizer.state[parameter]["momentum_buffer"] = momentum[name].to(parameter)
        set_random_state(state)
        return int(state["epoch"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise PosteriorError(f"this is not the state of a fit of this network: {error}") from error


def _length(loader: object) -> int | None:
    """Batches of a loader; None if it cannot say, as a DataLoader of an IterableDataset, whose `len` raises."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _images_and_labels(batch: Sequence[Tensor], device: torch.device, where: str) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not all(isinstance(part, Tensor) for part in batch[:2]):
        raise PosteriorError(f"{where} is not a pair of tensors (images, labels) but a {type(batch).__name__}")
    if batch[1].is_floating_point() or batch[1].is_complex():
        raise PosteriorError(f"{where} has labels of type {batch[1].dtype}: labels are whole numbers, one a sample")
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True).long()


def _check_labels(labels: Tensor, logits: Tensor, where: str) -> None:
    """Raise before the loss sees a label of no class, which on a GPU would end the process's use of it."""
    if labels.shape != logits.shape[:1] or bool(((labels < 0) | (labels >= logits.shape[1])).any()):
        raise PosteriorError(
            f"{where} has labels of shape {list(labels.shape)}, {labels.flatten()[:8].tolist()}...; the network has outputs "
            f"of shape {list(logits.shape)} and labels count its classes from 0"
        )
