"""Fitting the source posterior along the path of SGD (SWAG, Maddox et al., 2019)."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petal._random import random_state, set_random_state
from petal.calls import (
    called,
    check_batch,
    check_logits,
    finite,
    inputs_and_labels,
    logits_in,
    moved,
    not_finite,
    with_output,
)
from petal.errors import PosteriorError
from petal.norm import batch_norms, unwrapped
from petal.posterior import DiagonalGaussian, LowRankGaussian, source_confidence

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitProgress:
    """How far `fit_swag` is, after every batch: numbers count from 1, `batches` is None if the loader has no length."""

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
    """After which batches of an epoch (counted from 1) a snapshot is taken: evenly spaced, the last one at its end.

    >>> snapshot_batches(10, 4)
    [3, 5, 8, 10]
    """
    return [math.ceil(batches * (i + 1) / per_epoch) for i in range(per_epoch)]


def fit_swag(
    model: nn.Module,
    loader: Iterable[Any],
    epochs: int = 5,
    lr: float = 8e-4,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    snapshots_per_epoch: int = 1,
    rank: int | None = None,
    train_batch_norm: bool = False,
    damping: float = 1e-6,
    autocast: torch.dtype | None = None,
    progress: Callable[[FitProgress], None] | None = None,
    on_snapshot: Callable[[dict[str, Tensor]], None] | None = None,
    on_epoch: Callable[[int, dict[str, Tensor]], None] | None = None,
    state: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Any] | None = None,
) -> DiagonalGaussian | LowRankGaussian:
    """Fit SWAG-diagonal: continue the training of a copy of `model` by SGD and take the moments of its path.

    With a `rank` K it is SWAG: half the variance, and as factors the deviations of the last K snapshots from the mean,
    divided by sqrt(2 (K - 1)).

    Defaults are the paper's for CIFAR; for ImageNet it uses epochs=2, snapshots_per_epoch=4, lr=1e-4. `loader` is any
    iterable of (images [N, ...], labels [N]) that can be iterated `epochs` times; of dicts with `labels` too, and inputs may
    be tuples or dicts of tensors. `output` finds the logits in what the network returns, where they are not `logits` or the
    first of a tuple. Batch-norm statistics stay as they are
    (their affine parameters are trained like all others); with train_batch_norm=True they are trained too and, at the end,
    recomputed for the mean by a pass over the loader. `autocast` is a dtype for mixed precision. `progress` is called
    after every batch, `on_snapshot` with the parameters of every snapshot, `on_epoch` after every epoch with its number and
    a state of flat tensors. Given that `state`, the same arguments, and a loader that continues with the next epoch, the fit
    continues from there exactly. At the end the loader is run through once more, for how sure the mean is of these images.
    """
    for name, value in (("epochs", epochs), ("snapshots_per_epoch", snapshots_per_epoch)):
        if value < 1:
            raise PosteriorError(f"{name} must be at least 1, got {value}")
    if not (math.isfinite(lr) and lr > 0):
        raise PosteriorError(f"lr must be a finite number > 0, got {lr}")
    batches = _length(loader)
    if batches is None and snapshots_per_epoch > 1:
        raise PosteriorError("several snapshots per epoch need a loader with a length; use snapshots_per_epoch=1")
    if batches is not None and batches < snapshots_per_epoch:
        raise PosteriorError(f"{snapshots_per_epoch} snapshots per epoch do not fit into {batches} batches per epoch")

    model = unwrapped(model) if output is None else with_output(model, output)
    total = epochs * snapshots_per_epoch
    if rank is not None and not 2 <= rank <= total:
        raise PosteriorError(f"rank is from 2 to the number of snapshots, {total}; got {rank}")

    network = deepcopy(model).requires_grad_(True).train()
    if not train_batch_norm:
        for _, layer in batch_norms(network):
            layer.eval()
    parameters = dict(network.named_parameters())
    if not parameters:
        raise PosteriorError("the network has no parameters: there is nothing to fit")
    like = next(iter(parameters.values()))
    device = like.device
    optimizer = torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    moments, path = Moments(), deque[dict[str, Tensor]](maxlen=rank or 0)
    due = set(snapshot_batches(batches, snapshots_per_epoch)) if batches is not None else set()

    def snapshot() -> None:
        moments.add(parameters)
        if rank is not None:
            path.append({name: p.detach().clone() for name, p in parameters.items()})
        if on_snapshot is not None:
            on_snapshot({name: p.detach().clone() for name, p in parameters.items()})

    done = 0 if state is None else _continue_swag(state, network, optimizer, moments, path)
    for epoch in range(done + 1, epochs + 1):
        number = 0
        for number, batch in enumerate(loader, start=1):
            x, y = _inputs_and_labels(batch, like, f"batch {number} of epoch {epoch}")
            with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits = check_logits(logits_in(called(network, x)), x)
                _check_labels(y, logits, f"batch {number} of epoch {epoch}")
                loss = nn.functional.cross_entropy(logits, y)
            if not loss.isfinite():
                why = f"lower lr={lr}" if bool(finite(x)) else str(not_finite(x))
                raise PosteriorError(f"the loss is {loss.item()} in batch {number} of epoch {epoch}: {why}")
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
            on_epoch(epoch, _swag_state(epoch, network, optimizer, moments, path))

    dtypes = {name: value.dtype for name, value in model.named_parameters()}
    mean = {name: value.to(dtypes[name]) for name, value in moments.mean().items()}
    var = {name: value.to(dtypes[name]) for name, value in moments.var().items()}
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(mean[name])
    if train_batch_norm:
        batches_again = (_inputs_and_labels(batch, like, "a batch")[0] for batch in loader)
        torch.optim.swa_utils.update_bn(batches_again, _Called(network))
        counts = [layer.num_batches_tracked for _, layer in batch_norms(network) if layer.num_batches_tracked is not None]
        if counts and not any(counts):
            raise PosteriorError("the loader gave no batches for the mean's batch-norm statistics: it runs only once")
    about: dict[str, Any] = {"damping": damping, "buffers": dict(network.named_buffers())}
    about["confidence"] = source_confidence(network, loader)
    if rank is None:
        return DiagonalGaussian(mean, var, **about)
    scale = (2 * (rank - 1)) ** -0.5
    exact = moments.mean()
    factors = {n: torch.stack([(point[n].double() - exact[n]) * scale for point in path]).to(m) for n, m in mean.items()}
    return LowRankGaussian(mean, {name: value / 2 for name, value in var.items()}, factors=factors, **about)


def _swag_state(
    epoch: int, network: nn.Module, optimizer: torch.optim.Optimizer, moments: Moments, path: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Everything that a fit has changed so far, torch's random numbers included: dropout uses them."""
    tensors = {f"network.{name}": value.detach() for name, value in network.state_dict().items()}
    tensors |= {f"moments.{name}": value for name, value in moments.state_dict().items()}
    for name, parameter in network.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{name}"] = momentum
    for number, point in enumerate(path):
        tensors |= {f"path.{number}.{name}": value for name, value in point.items()}
    return tensors | random_state() | {"epoch": torch.tensor(epoch)}


def _continue_swag(
    state: Mapping[str, Tensor], network: nn.Module, optimizer: torch.optim.Optimizer, moments: Moments,
    path: deque[dict[str, Tensor]],
) -> int:  # fmt: skip
    """Put everything where `_swag_state` found it; returns the number of epochs done."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    device = next(network.parameters()).device
    try:
        network.load_state_dict(part("network."))
        moments.load_state_dict({key: value.to(device) for key, value in part("moments.").items()})
        for number in range(min(moments.count, path.maxlen or 0)):
            point = part(f"path.{number}.")
            path.append({name: point[name].to(p) for name, p in network.named_parameters()})
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


def _inputs_and_labels(batch: Any, like: Tensor, where: str) -> tuple[Any, Tensor]:
    x, y = inputs_and_labels(batch)
    if y is None:
        raise PosteriorError(
            f"{where} has no labels: it is a {type(batch).__name__}, and what is needed is (images, labels) or a dict with "
            "labels; petal.fit_laplace does without"
        )
    if not isinstance(y, Tensor):
        raise PosteriorError(f"{where} has labels that are a {type(y).__name__}: use torch.tensor(labels)")
    if y.is_floating_point() or y.is_complex():
        raise PosteriorError(f"{where} has labels of type {y.dtype}: labels are whole numbers, one per sample")
    x = moved(x, like)
    check_batch(x, like.device, like.dtype, values=False)
    return x, y.to(like.device, non_blocking=True).long()


class _Called(nn.Module):
    """A network that is given batches of any form, for `update_bn`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        return called(self.network, x)


def _check_labels(labels: Tensor, logits: Tensor, where: str) -> None:
    """Raise before the loss sees a label of no class, which on a GPU would end the process's use of it."""
    if labels.shape != logits.shape[:1]:
        hint = ""
        if labels.dim() == 2 and len(labels) == len(logits):
            hint = ": take labels.squeeze(1)" if labels.shape[1] == 1 else "; of one-hot labels take labels.argmax(1)"
        raise PosteriorError(
            f"{where} has labels of shape {list(labels.shape)}, and the network has outputs of shape {list(logits.shape)}: "
            f"labels are one whole number for each sample{hint}"
        )
    if bool(((labels < 0) | (labels >= logits.shape[1])).any()):
        raise PosteriorError(
            f"{where} has labels from {int(labels.min())} to {int(labels.max())}; labels count the network's "
            f"{logits.shape[1]} classes from 0"
        )
