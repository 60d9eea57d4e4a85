"""TensorBoard: event files in FOLDER/PROJECT/NAME, for `tensorboard --logdir FOLDER`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from petal.errors import ConfigError
from petal.track.tracker import Tracker

SECONDS = 10            # at most that many are lost with the process


class TensorBoard(Tracker):
    """Numbers as scalars; all those of a batch are one event, so that a batch is there or is not. Settings are not shown."""

    package: ClassVar[str] = "tensorboard"

    @property
    def place(self) -> Path:
        """The folder of the event files."""
        return self.folder / self.project / self.name

    def written(self) -> int:
        """The step after the last event."""
        steps = self._steps("n")
        return max(steps) + 1 if steps else 0

    def ended(self) -> bool:
        """True if there is an event with the number of all samples."""
        return bool(self._steps("mean/n"))

    def _steps(self, tag: str) -> list[int]:
        mark = self.place / "petal.key"
        if not any(self.place.glob("events.*")):
            return []
        if not mark.is_file() or mark.read_text(encoding="utf-8") != self.key:
            raise ConfigError(f"{self.place} has events of another run: give another project or folder, or remove it")
        events = self.needed("tensorboard.backend.event_processing.event_accumulator")
        found = events.EventAccumulator(str(self.place), size_guidance={events.SCALARS: 0})
        found.Reload()
        return [e.step for e in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []

    def begin(self) -> None:
        """Begin an event file, beside those that are there."""
        if self.key is not None:
            self.place.mkdir(parents=True, exist_ok=True)
            (self.place / "petal.key").write_text(self.key, encoding="utf-8")
        writer = self.needed("tensorboard.summary.writer.event_file_writer")
        self.writer: Any = writer.EventFileWriter(str(self.place), flush_secs=SECONDS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event."""
        summary, event = (self.needed(f"tensorboard.compat.proto.{name}_pb2") for name in ("summary", "event"))
        scalars = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        made = event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=scalars))
        self.writer.add_event(made)

    def write_end(self, step: int, values: Mapping[str, float]) -> None:
        """One event with all scores."""
        self.write(step, values)

    def end(self) -> None:
        """Close the file."""
        self.writer.close()
