"""What an adapter does, in a few lines for people."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petal.methods.base import Adapter


def description(adapter: "Adapter") -> dict[str, str]:
    """What every adapter can say of itself: its method, network, what adapts, how fast, and how it is executed."""
    title = type(adapter).__name__ if adapter.card is None else adapter.card.title
    every = sum(p.numel() for p in adapter.model.parameters())
    adapted = sum(p.numel() for p in adapter.adapted.values())
    share = "nothing" if not adapted else "all" if adapted == every else f"{adapted:,} in {len(adapter.adapted)} tensors"
    out = {"method": title, "network": f"{type(adapter.model).__name__}, {every:,} parameters, of which {share} adapt"}
    if adapted:
        often = "once a batch" if adapter.steps == 1 else f"{adapter.steps} times a batch"
        out["rates"] = f"{rates_as_text(adapter.rates)}; {type(adapter.optimizer).__name__} {often}"
    return out | {"runs": f"{'eager' if adapter.executor is None else 'accelerated'}, on {adapter.device}"}


def rates_as_text(lr: Any) -> str:
    """Learning rates as they were given."""
    if isinstance(lr, Mapping):
        return f"{min(lr.values()):g} to {max(lr.values()):g}" if lr else "none"
    return f"{lr:g}" if isinstance(lr, float) else str(lr)


def in_short(value: Any) -> str:
    """A setting as the text that makes it: of a dataclass what differs from its defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    given = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
    shown = [f"{name}={v!r}" for name, v, default in given if v != default or len(given) == 1]
    return f"{type(value).__name__}({', '.join(shown)})"
