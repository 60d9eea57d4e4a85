"""An adapter as a module like others: copies and files of it, threads that share it, and the network in it to take away."""

import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from petal.calls import called, check_batch, inputs_and_labels, moved
from petal.errors import ConfigError, PetalWarning
from petal.methods.export import write_network
from petal.norm import batch_norms, plain_copy

P = TypeVar("P", bound="Portable")

_writing: ContextVar[bool] = ContextVar("_writing", default=False)      # copies are made to be written


class Portable(nn.Module):
    """What adapters and wrappers are besides a method.

    `copy.deepcopy`, pickle and `torch.save` work, and the copy goes on as the original would, to the bit; one that is
    accelerated makes an engine of its own. Calls from several threads wait for each other. Another process is given what
    `pickle.dumps` makes of it: as an argument of `multiprocessing.Process` torch would send an adapter as shared tensors, of
    a copy that is gone before the process has started.
    """

    stopped: bool                               # learning is off
    by_batch: bool                              # predictions go by the statistics of the batch
    describe: Callable[[], dict[str, str]]
    plain_descent: Callable[[], Any]
    execute_with: Callable[[Any], None]

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()            # one for an adapter and what goes around it
        self.stopped = self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        with self._lock:
            return super().__call__(*args, **kwargs)

    def train(self: P, mode: bool = True) -> P:
        """Networks of a method stay in evaluation mode; asking for another changes nothing."""
        return self

    def freeze(self) -> None:
        """Stop learning: calls predict with the weights as they are, until `thaw`."""
        self.stopped = True

    def thaw(self) -> None:
        """Learn again."""
        self.stopped = False

    def export(
        self,
        data: Iterable[Any] | None = None,
        network: str | None = None,
        path: str | Path | None = None,
        example: Any = None,
    ) -> nn.Module:
        """A copy of the adapted network, a module of the class and with the names that the user's has, to save and run.

        It is the teacher where there is one, else the model; `network` names another. Where the method normalises by the
        statistics of the batch so does the copy, which then answers as the network does in here and has no running
        statistics. With `data`, batches as adapted to, these are computed anew: the copy then takes batches of any size, and
        its `state_dict` fits the user's class. Methods that put norms of their own into a network leave them in the copy.

        With `path` it is written too: to a name in `.safetensors` its `state_dict`, to one in `.onnx` a graph for batches of
        any size like `example`, where torch can make one; that needs `pip install 'petal-tta[onnx]'`.
        """
        source = getattr(self, network or ("teacher" if hasattr(self, "teacher") else "model"), None)
        if not isinstance(source, nn.Module):
            known = ", ".join(name for name, _ in getattr(self, "method", self).named_children())
            raise ConfigError(f"there is no network {network!r} in here: {known}")
        with torch.inference_mode(False), self._lock:
            copy = plain_copy(source, running=data is not None)
            if data is not None:
                renew_statistics(copy, data)
            if path is not None:
                write_network(copy, path, example)
        return copy

    def tell_of_one(self, x: Tensor) -> None:
        """Warn, once, where a batch of one sample is normalised by its own statistics."""
        if self.by_batch and len(x) == 1 and not self._told:
            self._told = True
            warnings.warn(
                f"a batch of one sample is normalised by its own statistics, which say little of a domain "
                f"({type(self).__name__}): give larger batches, or put petal.SmallBatch around the method",
                PetalWarning, stacklevel=2,
            )  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(f"{name:<10}{value}" for name, value in self.describe().items())

    # Copies and files

    def __getstate__(self) -> dict[str, Any]:
        """All of it but the lock, and what the copy makes anew: the engine and what it has made fast."""
        state = {name: value for name, value in vars(self).items() if name != "_lock"}
        executor = state.get("executor")
        if executor is not None:
            state |= {"executor": None, "_networks": {}, "descent": self.plain_descent(), "_again": executor.again()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "stopped" in state:          # of the method itself: what goes around it uses its lock
            self._lock = RLock()
        self._to_write = _writing.get()
        again = None if self._to_write else vars(self).pop("_again", None)
        if again is not None:
            with torch.inference_mode(False):
                self.execute_with(again(self))

    def __deepcopy__(self: P, memo: dict[int, Any]) -> P:
        copy = memo[id(self)] = type(self).__new__(type(self))
        with torch.inference_mode(False), self._lock:
            copy.__setstate__(deepcopy(self.__getstate__(), memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain copy is written: an engine's parameters are pieces of one storage, which pickle would write for each."""
        if vars(self).get("_to_write"):
            return super().__reduce_ex__(protocol)
        token = _writing.set(True)
        try:
            return _same, (deepcopy(self),)
        finally:
            _writing.reset(token)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        tensor: Tensor = next(self.model.parameters()).detach()     # type: ignore[union-attr]
        asked = fn(tensor)
        if (asked.device, asked.dtype) == (tensor.device, tensor.dtype):
            return self
        raise ConfigError(
            f"a method stays on the device and in the precision it was built with ({tensor.device}, {tensor.dtype}): move "
            "the network first, build another around it, and new.load_weights(old.weights()) takes over what was learned"
        )


def _same(adapter: Portable) -> Portable:
    return adapter


def renew_statistics(network: nn.Module, data: Iterable[Any]) -> None:
    """Running statistics of batch norms as the mean over batches, dropout off."""
    like = next(network.parameters())
    layers = [layer for _, layer in batch_norms(network)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
        layer.momentum = None           # the mean over all batches
    with torch.no_grad():
        seen = 0
        for batch in data:
            x = moved(inputs_and_labels(batch)[0], like)
            check_batch(x, like.device, like.dtype)
            called(network, x)
            seen += 1
    if not seen:
        raise ConfigError("the data gave no batch to compute the statistics of")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    network.eval()
