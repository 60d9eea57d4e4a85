"""What a method accepts: batches and settings, checked with errors that name the value."""

import math
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor

from petal.errors import ConfigError, InputError


def check_batch(x: Tensor, device: torch.device, dtype: torch.dtype, values: bool = True) -> None:
    """Raise an InputError that names the value unless `x` is a batch a method can take.

    Without `values` they are not looked at: an executor does so on the device.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"a batch is a torch.Tensor, got {type(x).__name__}")
    if x.dim() < 2:
        raise InputError(f"a batch has at least two dimensions [N, ...], got shape {list(x.shape)}")
    if x.numel() == 0:
        raise InputError(f"the batch is empty: shape {list(x.shape)}")
    if x.device != device:
        raise InputError(f"the batch is on {x.device} and the network on {device}: move it with x.to({str(device)!r})")
    if x.dtype != dtype:
        hint = "images are floats in [0, 1]: use x.float() / 255" if x.dtype == torch.uint8 else f"use x.to({dtype})"
        raise InputError(f"the batch is {x.dtype} and the network {dtype}: {hint}")
    if values and not bool(x.isfinite().all()):
        raise not_finite(x)


def not_finite(x: Tensor) -> InputError:
    """The error for a batch with NaN or Inf, which says how many samples have them."""
    bad = int((~x.isfinite()).flatten(1).any(1).sum())
    return InputError(f"the batch has NaN or Inf in {bad} of {x.shape[0]} samples: leave those out")


def check_number(name: str, value: float, low: float = -math.inf, high: float = math.inf, whole: bool = False) -> None:
    """Raise a ConfigError that names the setting unless the value is a number in [low, high]."""
    kind = Integral if whole else Real  # NumPy's numbers are of these kinds too
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
        what = "a whole number" if whole else "a number"
        limits = f" from {low:g}" * (low > -math.inf) + f" to {high:g}" * (high < math.inf)
        raise ConfigError(f"{name} must be {what}{limits}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ConfigError that lists the choices unless the value is one of them."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def generator_of(seed: int | torch.Generator, device: torch.device) -> torch.Generator:
    """The source of randomness that a seed means, or the one that is given, on the device."""
    if isinstance(seed, torch.Generator):
        if seed.device.type != device.type:
            raise ConfigError(f"the generator is on {seed.device} and the network on {device}: they must be the same")
        return seed
    check_number("seed", seed, low=0, whole=True)
    return torch.Generator(device).manual_seed(seed)
