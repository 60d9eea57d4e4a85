"""Frozen data whose mappings are read-only, made to be copied and pickled."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Frozen:
    """Base of frozen dataclasses with read-only mappings. A copy is itself: it never changes."""

    def __deepcopy__(self: T, memo: Any) -> T:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: {key: _alone(tensor) for key, tensor in value.items()} if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that is no piece of a larger one, which pickle would write whole."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor
