"""What a device can do to a call: no memory is left, or the device itself is gone."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from petal.errors import DeviceLost, OutOfMemory, PetalError, PetalWarning
from petal.methods.network import described
from petal.order import Keys

if TYPE_CHECKING:
    from petal.methods.base import Adapter

FATAL = (       # of CUDA's messages: after one of these every further call of the process fails
    "illegal memory access", "unspecified launch failure", "device-side assert", "uncorrectable", "hardware stack error",
    "illegal instruction", "misaligned address", "invalid program counter", "launch timed out", "unknown error",
    "busy or unavailable", "no cuda-capable device", "driver shutting down", "all cuda-capable devices", "device lost",
)  # fmt: skip


def is_lost(error: BaseException) -> bool:
    """True if an error says that the device no longer works, for this process at least.

    >>> [is_lost(RuntimeError(f"CUDA error: {what}")) for what in ("unspecified launch failure", "invalid argument")]
    [True, False]
    """
    if error.__cause__ is not None and is_lost(error.__cause__):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return ("cuda" in text or "nccl" in text) and any(message in text for message in FATAL)


def lost(error: BaseException, device: torch.device) -> DeviceLost:
    """What to raise in its place."""
    while isinstance(error, PetalError) and error.__cause__ is not None:
        error = error.__cause__
    first = str(error).strip().partition("\n")[0]
    return DeviceLost(
        f"{device} is lost ({first}). Nothing on it can be read any more: start the process again, where it is to go on "
        "from its last checkpoint"
    )


def with_memory(adapter: "Adapter", learn: Callable[[], Tensor], x: Tensor, stream: Keys) -> Tensor:
    """The answer of a call that learns, by `learn`; where memory runs out meanwhile, that of one that does not.

    Everything is then as before the call, and counted in `skipped` and `short_of_memory`. Of several ranks none may leave a
    step out that the others take: there the error goes on.
    """
    if adapter.descent is not None:
        adapter.descent.moving = False
    try:
        return learn()
    except torch.OutOfMemoryError as error:
        if getattr(adapter, "sharing", None) is not None:
            raise
        if adapter.descent is not None and adapter.descent.moving:
            raise OutOfMemory(
                f"memory ran out on {adapter.device} while the weights were being changed: go back to a checkpoint "
                "(petal.load) or reset()"
            ) from error
        answer = adapter._answered
    finally:
        adapter._answered = None
    free(adapter.device)                    # outside of the except block, which holds what the step had made
    method = getattr(adapter, "method", adapter)
    method.skipped, method.short_of_memory = method.skipped + 1, method.short_of_memory + 1
    warnings.warn(
        f"memory ran out: a batch {described(x)} is answered and not learned from; more may follow, and `short_of_memory` "
        "counts them", PetalWarning, stacklevel=4,
    )  # fmt: skip
    return adapter.predict(x, stream) if answer is None else answer


def not_enough(x: Tensor) -> OutOfMemory:
    """What to raise if not even a prediction fits."""
    return OutOfMemory(f"a prediction for a batch {described(x)} does not fit into memory: give smaller ones")


def free(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
