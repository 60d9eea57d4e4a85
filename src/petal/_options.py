"""A dataclass's field as an option of a command: the field says all that the command line shows."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """What a command shows of a setting. `text` options are given as one text, which the command takes apart."""

    help: str
    flags: tuple[str, ...] = ()             # besides --NAME
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str | None = None
    panel: str | None = None
    text: bool = False


def option(default: Any, help: str, *flags: str, **shown: Any) -> Any:
    """A field with its default and what commands show of it; `shown` are fields of `Option`.

    >>> from dataclasses import fields
    >>> @dataclass
    ... class Settings:
    ...     views: int = option(32, "Views per batch.", low=1)
    >>> Settings().views, fields(Settings)[0].metadata["option"].help
    (32, 'Views per batch.')
    """
    return field(default=default, metadata={"option": Option(help, flags, **shown)})
