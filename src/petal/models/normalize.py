"""Input normalisation as part of the network, so that every network takes pixels in [0, 1]."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petal.errors import ModelError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_BEFORE = "normalised_before"


class Normalize(nn.Module):
    """`(x - mean) / std` per channel, or nothing at all when both are None.

    The statistics are buffers, so they follow `.to(...)`, but not persistent ones: they are no part of the
    `state_dict`, whose keys stay those of the published checkpoints.

    >>> Normalize((0.5,), (0.25,))(torch.ones(1, 3, 1, 1)).flatten().tolist()
    [2.0, 2.0, 2.0]
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise ModelError("input normalisation needs both mean and std, or neither")
        if mean is None or std is None:
            self.register_buffer("mean", None, persistent=False)
            self.register_buffer("std", None, persistent=False)
            return
        if len(mean) not in (1, 3) or len(std) not in (1, 3) or min(std) <= 0:
            raise ModelError(
                f"input normalisation takes 1 or 3 numbers each and a positive std, not mean={tuple(mean)}, "
                f"std={tuple(std)}"
            )
        self.register_buffer("mean", torch.tensor(list(mean)).view(1, -1, 1, 1), persistent=False)  # [1, C, 1, 1]
        self.register_buffer("std", torch.tensor(list(std)).view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images `[N, C, H, W]`."""
        if self.mean is None or self.std is None:
            return x
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Show the statistics in `print(model)`."""
        if self.mean is None or self.std is None:
            return "none"
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def find_normalize(model: nn.Module) -> Normalize | None:
    """The normalisation that is a direct child of a network, or goes before it, if there is one."""
    before = vars(model).get(_BEFORE)
    return before[0] if before else next((child for child in model.children() if isinstance(child, Normalize)), None)


def attach_normalize(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Make a foreign network normalise its own input, without a wrapper: its parameter names stay as they are."""
    if isinstance(model, nn.Sequential):                    # it would run one more child
        vars(model)[_BEFORE] = (Normalize(mean, std),)
        model.register_forward_pre_hook(_normalize_first_argument)
        return model
    name = "normalize" if not hasattr(model, "normalize") else "petal_normalize"
    model.add_module(name, Normalize(mean, std))
    model.register_forward_pre_hook(_normalize_first_argument)
    return model


def _normalize_first_argument(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # A plain function that reads the statistics from the module it is called with: right after deepcopy and `.to` too.
    normalize = find_normalize(model)
    if normalize is not None and _BEFORE in vars(model):    # it is no child, so nothing else moves it
        normalize.to(args[0].device, args[0].dtype)
    return args if normalize is None else (normalize(args[0]), *args[1:])
