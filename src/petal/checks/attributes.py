"""Everything an adapter holds that can change: tensors, numbers and random states, wherever they hang, by name."""

import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from petal.methods import Adapter, Source

RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)
NO_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
OWN = frozenset(vars(Source(nn.LayerNorm(1))))         # what the base class keeps is its own business
HIDDEN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Leaf:
    """A copy of a value as it was; the object that holds it, or the list or dict that it is in, and by which attribute."""

    value: Any
    owner: object
    at: str             # where the object is
    attribute: str
    kind: str           # "parameter", "buffer", "random" or "value"

    def differs(self, other: "Leaf | None") -> bool:
        """True unless the other is there and has the same value, to the bit."""
        if other is None or type(self.value) is not type(other.value):
            return True
        return not alike(self.value, other.value)


def alike(one: Any, other: Any) -> bool:
    """True for equal values; NaN is equal to NaN, and tensors of another shape or type are not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other) or (one != one and other != other)


def attributes(adapter: Adapter) -> dict[str, Leaf]:
    """Copies of all values an adapter holds, by where they are: `mean`, `bank.items[3]`, `model.fc.weight`.

    Lists, dicts and plain objects are gone through. What the base class keeps for itself is left out, and so are functions.
    """
    found: dict[str, Leaf] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str, owner: object, at: str, attribute: str, kind: str) -> None:
        known, plain = _as_value(value)
        if known:
            found[path] = Leaf(plain, owner, at, attribute, "random" if isinstance(value, RANDOM) else kind)
        elif not isinstance(value, NO_STATE) and id(value) not in seen:
            seen.add(id(value))
            for step, inner, inner_kind in _parts(value):
                where = (path + step).lstrip(".")
                if step.startswith("."):
                    visit(inner, where, value, path, step[1:], inner_kind)
                else:
                    visit(inner, where, owner, at, attribute, inner_kind)

    visit(adapter, "", adapter, "", "", "value")
    return found


@contextmanager
def watched(owner: object, names: Collection[str]) -> Iterator[set[str]]:
    """Which of an object's attributes are read in here before they are first written; all of them if it cannot be told."""
    read, written = set[str](), set[str]()
    kind: Any = type(owner)

    def get(self: Any, name: str) -> Any:
        if name in names and name not in written:
            read.add(name)
        return kind.__getattribute__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        written.add(name)
        kind.__setattr__(self, name, value)

    try:
        owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put})
    except TypeError:           # of a class with slots
        yield set(names)
        return
    try:
        yield read
    finally:
        owner.__class__ = kind


def _as_value(value: Any) -> tuple[bool, Any]:
    """True and a copy if it is one value."""
    if isinstance(value, Tensor):
        return True, value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return True, value.tolist()
    if isinstance(value, PLAIN):
        return True, value
    if isinstance(value, torch.Generator):
        return True, value.get_state()
    if isinstance(value, random.Random):
        return True, value.getstate()
    if isinstance(value, np.random.Generator):
        return True, _listed(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return True, _listed(value.get_state(legacy=False))
    if isinstance(value, (set, frozenset)):
        return True, sorted(map(repr, value))
    return False, None


def _listed(state: Any) -> Any:
    """NumPy's random state with lists for its arrays."""
    if isinstance(state, dict):
        return {key: _listed(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _parts(value: Any) -> Iterator[tuple[str, Any, str]]:
    """What an object holds: how the way goes on, the value, and its kind."""
    if isinstance(value, nn.Module):
        for kind, held in (("parameter", value._parameters), ("buffer", value._buffers), ("value", value._modules)):
            yield from ((f".{name}", inner, kind) for name, inner in held.items())
        own = HIDDEN | OWN if isinstance(value, Adapter) else HIDDEN
        yield from ((f".{name}", inner, "value") for name, inner in list(vars(value).items()) if name not in own)
    elif isinstance(value, Mapping):
        for number, (key, inner) in enumerate(list(value.items())):
            yield f"[{key!r}]" if isinstance(key, (str, int, float, tuple)) else f"[{number}]", inner, "value"
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", inner, "value") for number, inner in enumerate(value))
    else:
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")}
        yield from ((f".{name}", inner, "value") for name, inner in (held | getattr(value, "__dict__", {})).items())
