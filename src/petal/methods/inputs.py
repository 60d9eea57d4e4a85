"""What a method accepts: batches and settings, checked with errors that name the value."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

import torch

from petal.calls import Inputs, check_batch, given, not_finite
from petal.errors import ConfigError, InputError

__all__ = ["check_batch", "check_choice", "check_number", "check_remembered", "generator_of", "not_finite"]


def check_remembered(x: object) -> None:
    """Raise an InputError for a batch of several tensors: what a memory keeps is one."""
    if isinstance(x, (Inputs, Mapping, tuple, list)):
        raise InputError(f"this method remembers samples, and a sample is one tensor; got a {type(given(x)).__name__}")


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
