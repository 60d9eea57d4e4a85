"""The state of torch's own random numbers, which networks in training and users' augmentations draw from."""

from collections.abc import Mapping

import torch
from torch import Tensor

PREFIX = "random."


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators as tensors by device: random.cpu, and random.cuda.N once CUDA is in use."""
    state = {f"{PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state |= {f"{PREFIX}cuda.{n}": torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())}
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Put the generators that `state` names back where they were, on the devices that are here.

    >>> before = random_state()
    >>> drawn = torch.rand(3)
    >>> set_random_state(before)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    if f"{PREFIX}cpu" in state:
        torch.set_rng_state(state[f"{PREFIX}cpu"])
    for number in range(torch.cuda.device_count()):
        if f"{PREFIX}cuda.{number}" in state:
            torch.cuda.set_rng_state(state[f"{PREFIX}cuda.{number}"], number)
