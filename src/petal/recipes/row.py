"""A row of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of a table: a method with its settings. `own` names the options that make it differ from its method."""

    name: str
    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    reset_on_domain_change: bool = False
    random: bool = True                     # draws random numbers: several seeds give several results
    wraps: tuple[str, ...] = ()             # what goes around the method, from the inside out; see `rows.WRAPPERS`
    wrapper_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
