"""What the trackers share: which numbers go out, each batch once, also where a run was interrupted."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from petal._optional import optional
from petal.evaluate import Record, Result

SCORES = ("n", "error", "nll", "brier", "ece")


class Tracker:
    """A callback that writes the numbers of every batch, and the scores of the whole in the end, to some tool.

    The step is the position in the stream. `folder` is where files go, `project` and `name` what the tool calls it,
    `settings` what it shows beside the numbers. One that is given the `key` of a run goes on where what was written under
    that key ends: the records of an interrupted run may then come again, and only what is not there is written.
    """

    package: ClassVar[str]                  # what has to be installed

    def __init__(
        self,
        folder: str | Path = ".",
        project: str = "petal",
        name: str = "run",
        settings: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        self.folder, self.project, self.name = Path(folder), project, name
        self.settings, self.key = dict(settings or {}), key
        self.needed(self.package)
        self._next: int | None = None       # the first position that is not there yet
        self._opened = False

    @classmethod
    def needed(cls, module: str) -> Any:
        """A module of the tool; an error that says what to install if it is not there."""
        return optional(module, cls.__name__, "track")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def on_record(self, record: Record) -> None:
        """Write the numbers of a batch, unless they are there."""
        if self._next is None:
            self._next = 0 if self.key is None else self.written()
        if record.position < self._next:
            return
        self._begin()
        self.write(record.position, numbers(record))
        self._next = record.position + 1

    def on_end(self, result: Result) -> None:
        """Write the scores of the whole stream as `mean/error` and so on, unless they are there, and close."""
        if self.key is None or not self.ended():
            self._begin()
            scores = {f"mean/{name}": float(getattr(result.mean, name)) for name in SCORES}
            last = result.records[-1].position if result.records else 0
            self.write_end(last, {name: value for name, value in scores.items() if math.isfinite(value)})
        self.close()

    def close(self) -> None:
        """Let go of the tool; what was written stays."""
        if self._opened:
            self._opened = False
            self.end()

    def _begin(self) -> None:
        if not self._opened:
            self.begin()
            self._opened = True

    # What a tool does

    @abstractmethod
    def written(self) -> int:
        """How far this run has been written: the first position that is not there."""

    @abstractmethod
    def ended(self) -> bool:
        """True if the scores of the whole are there."""

    @abstractmethod
    def begin(self) -> None:
        """Open the tool."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one batch."""

    @abstractmethod
    def write_end(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scores of the whole."""

    @abstractmethod
    def end(self) -> None:
        """Close the tool."""


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record, without its position."""
    found = {name: value for name, value in record.to_json().items() if isinstance(value, (bool, int, float))}
    return {name: float(value) for name, value in found.items() if name != "position" and math.isfinite(value)}
