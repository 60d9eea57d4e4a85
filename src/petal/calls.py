"""How a network is called, and what is taken of its answer: methods, fits and the engine all do it here.

A batch is a tensor [N, ...], or a tuple or dict of tensors that all have N rows: the network gets them as its arguments, a
dict by name. Of floats in the network's precision, or of whole numbers such as tokens. The answer is a tensor of logits
[N, classes], an object or mapping with `logits`, or a tuple that begins with them; `with_output` names any other.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petal.errors import InputError
from petal.norm import unwrapped

LABELS = ("labels", "label", "targets", "target", "y")      # what the labels are called in a dict batch


class Inputs:
    """A batch of several tensors. Methods treat it as a tensor: its length, `x[rows]`, and giving it to a network."""

    dtype = None

    def __init__(self, values: tuple[Tensor, ...] | dict[str, Tensor]) -> None:
        self.values = values

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in their order."""
        return list(self.named().values())

    def named(self) -> dict[str, Tensor]:
        """The tensors by name, or by their number in a tuple."""
        return self.values if isinstance(self.values, dict) else {str(n): v for n, v in enumerate(self.values)}

    @property
    def shape(self) -> torch.Size:
        """The number of samples; what a sample looks like differs."""
        return self.tensors[0].shape[:1]

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.tensors[0].device

    def dim(self) -> int:
        """One: samples."""
        return 1

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> "Inputs":
        return self.mapped(lambda tensor: tensor[rows])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The batch with every tensor changed."""
        if isinstance(self.values, dict):
            return Inputs({name: change(tensor) for name, tensor in self.values.items()})
        return Inputs(tuple(map(change, self.values)))


def taken(x: Any) -> Any:
    """A batch as methods handle it: `Inputs` for a tuple, list or mapping, anything else as it is."""
    if isinstance(x, Mapping):
        return Inputs(dict(x))
    return Inputs(tuple(x)) if isinstance(x, (tuple, list)) else x


def given(x: Any) -> Any:
    """A batch as its user gave it."""
    return x.values if isinstance(x, Inputs) else x


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors changed."""
    return x.mapped(change) if isinstance(x, Inputs) else change(x)


def moved(x: Any, like: Tensor) -> Any:
    """A batch where the network is; floats in its precision, whole numbers as they are."""
    x = taken(x)
    for name, part in parts(x).items():
        if not isinstance(part, Tensor):
            raise no_tensor(name, part)
    return mapped(x, lambda t: t.to(like.device, like.dtype if t.is_floating_point() else None, non_blocking=True))


def parts(x: Any) -> dict[str, Any]:
    """The tensors of a batch by what messages call them."""
    return {f"the batch's {name!r}": t for name, t in x.named().items()} if isinstance(x, Inputs) else {"the batch": x}


def shapes(x: Any) -> str:
    """The shapes of a batch, for messages."""
    if isinstance(x, Inputs):
        return ", ".join(f"{name} {list(getattr(t, 'shape', []))}" for name, t in x.named().items())
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def finite(x: Any) -> Tensor:
    """Whether all numbers are finite, on their device."""
    return torch.stack([tensor.isfinite().all() for tensor in parts(x).values()]).all()


def check_batch(x: Any, device: torch.device, dtype: torch.dtype, values: bool = True) -> None:
    """Raise an InputError that names the value unless `x` is a batch a method can take.

    Without `values` they are not looked at: an executor does so on the device.
    """
    every = parts(x)
    if not every:
        raise InputError("the batch is an empty tuple or dict: give it a tensor at least")
    for name, part in every.items():
        _check_tensor(name, part, device, dtype, least=1 if isinstance(x, Inputs) else 2)
    if len({len(part) for part in every.values()}) > 1:
        raise InputError(f"the tensors of a batch have one row a sample, all the same number; got {shapes(x)}")
    if values and not bool(finite(x)):
        raise not_finite(x)


def _check_tensor(name: str, x: Any, device: torch.device, dtype: torch.dtype, least: int) -> None:
    if not isinstance(x, Tensor):
        raise no_tensor(name, x)
    if x.dim() < least:
        which = "two dimensions [N, ...]" if least == 2 else "one dimension [N]"
        raise InputError(f"{name} has at least {which}, got shape {list(x.shape)}")
    if x.numel() == 0:
        raise InputError(f"{name} is empty: shape {list(x.shape)}")
    if x.device != device:
        raise InputError(f"{name} is on {x.device} and the network on {device}: move it with x.to({str(device)!r})")
    whole = not x.is_floating_point() and not x.is_complex()
    image = whole and (x.dtype == torch.uint8 or x.dim() > 3)
    if x.dtype != dtype and (image or not whole):
        hint = "images are floats in [0, 1]: use x.float() / 255" if image else f"use x.to({dtype})"
        raise InputError(f"{name} is {x.dtype} and the network {dtype}: {hint}")


def no_tensor(name: str, x: Any) -> InputError:
    """The error for what is no tensor."""
    if type(x).__module__ == "numpy":
        return InputError(f"{name} is a torch.Tensor, got a NumPy {type(x).__name__}: use torch.from_numpy(x)")
    return InputError(f"{name} is a torch.Tensor or a tuple or dict of them, got {type(x).__name__}")


def not_finite(x: Any) -> InputError:
    """The error for a batch with NaN or Inf, which says how many samples have them."""
    bad = torch.stack([(~tensor.isfinite()).reshape(len(tensor), -1).any(1) for tensor in parts(x).values()]).any(0)
    return InputError(f"the batch has NaN or Inf in {int(bad.sum())} of {len(bad)} samples: leave those out")


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor | None]:
    """What the network gets and the labels, or None, of what a loader or stream gives.

    That is an object with `x` and perhaps `y`, a tuple (inputs, labels, ...), a mapping, of whose entries one may be called
    `labels` (or as in `LABELS`), or inputs alone. A mapping with one other entry is that entry.

    >>> inputs_and_labels({"image": 1, "label": 2}), inputs_and_labels([3]), inputs_and_labels(((4, 5), 6))
    ((1, 2), (3, None), ((4, 5), 6))
    """
    x, y = batch, None
    if hasattr(batch, "x"):
        x, y = batch.x, getattr(batch, "y", None)
    elif isinstance(batch, Mapping):
        x = {name: value for name, value in batch.items() if name not in LABELS}
        x = next(iter(x.values())) if len(x) == 1 else x
        y = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and batch:
        x, y = batch[0], batch[1] if len(batch) > 1 else None
    return x, torch.from_numpy(y) if type(y).__module__ == "numpy" else y


def called(network: Callable[..., Any], x: Any) -> Any:
    """The network's answer to a batch; an input that it cannot take is an InputError."""
    try:
        if isinstance(x, Inputs):
            return network(**x.values) if isinstance(x.values, dict) else network(*x.values)
        return network(x)
    except Exception as error:
        if type(error) in (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            raise InputError(f"the network cannot take a batch of shape {shapes(x)}: {error}") from error
        raise


def logits_in(found: Any) -> Any:
    """The logits in what a network returned, as far as that tells which they are."""
    if isinstance(found, Mapping):
        return found.get("logits", found)
    if hasattr(found, "logits"):
        return found.logits
    return found[0] if isinstance(found, (tuple, list)) and found else found


def check_logits(logits: Any, x: Any) -> Tensor:
    """The logits, if they are [N, classes]; an InputError that says what came and what to do if not."""
    if isinstance(logits, Tensor) and logits.dim() == 2 and len(logits) == len(x):
        return logits
    came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if isinstance(logits, Mapping):
        came = f"{came} with {', '.join(map(repr, logits))}"
    raise InputError(
        f"a classifier returns logits [N, classes]: a tensor, an object with `logits` or a tuple that begins with them; for "
        f"{shapes(x)} this one returned {came}: say which they are, with petal.with_output(network, function)"
    )


def with_output(model: nn.Module, output: Callable[[Any], Any]) -> nn.Module:
    """A copy of a network whose answer is what `output` makes of the network's own: logits [N, classes].

    The names of its parameters stay.

    >>> network = with_output(nn.GRU(4, 3, batch_first=True), lambda answer: answer[1][-1])
    >>> network(torch.rand(2, 5, 4)).shape
    torch.Size([2, 3])
    """
    network = deepcopy(unwrapped(model))
    network.register_forward_hook(partial(_changed, output))
    return network


def _changed(output: Callable[[Any], Any], module: nn.Module, args: Any, found: Any) -> Any:
    return output(found)
