"""The records of jobs as callbacks get them: trackers by name, and whoever else listens."""

import json
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from petal._files import write_json
from petal.errors import PetalError, PetalWarning
from petal.evaluate import Callback, Record, summarize
from petal.methods.inputs import check_choice
from petal.track import TRACKERS


@dataclass(frozen=True)
class JobRecord(Record):
    """A record with what a job adds: the distance of the weights from where they started."""

    distance: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "JobRecord":
        """From a line of records.jsonl; what the callbacks do not know is left out."""
        return cls(**{f.name: line[f.name] for f in fields(cls) if f.name in line})


@dataclass(frozen=True)
class Tracking:
    """Trackers for every job: their names, the project, and where their files go (by default into the run's folder)."""

    kinds: tuple[str, ...]
    project: str = "petal"
    folder: Path | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice("track", kind, TRACKERS)
            TRACKERS[kind].needed(TRACKERS[kind].package)       # what is absent is found before anything runs

    def __call__(self, place: Path, about: Mapping[str, Any]) -> list[Callback]:
        """The trackers of the job in RUN/jobs/ID. They know it again by a key that is kept there."""
        run = place.parent.parent
        name, folder = f"{run.resolve().name}/{place.name}", self.folder or run
        settings = {name: v if isinstance(v, (str, int, float)) else json.dumps(v) for name, v in about.items()}
        return [
            TRACKERS[kind](folder / ("tensorboard" * (kind == "tensorboard")), self.project, name, settings, key(place))
            for kind in dict.fromkeys(self.kinds)
        ]


Callbacks = Callable[[Path, Mapping[str, Any]], Sequence[Callback]]     # from a job's folder and settings


def key(place: Path) -> str:
    """What a job is called in other tools, kept in its folder: a run that is made anew is another one there."""
    path = place / "track.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        write_json(path, {"key": uuid.uuid4().hex[:16]})
    return key(place)


class Listeners:
    """The callbacks of one job. They get every record, those of before an interruption too, and the result at its end.

    One that fails is left out with a warning, and the run goes on: its records are on disk, and a tracker that is asked for
    again takes them from there. What petal refuses on purpose ends the run.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks, self.stack = list(callbacks), ExitStack()

    def __enter__(self) -> "Listeners":
        for callback in self.callbacks:
            if isinstance(callback, AbstractContextManager):
                self.stack.push(callback.__exit__)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._tried("the trackers", self.stack.close)

    def tell(self, *lines: Mapping[str, Any]) -> None:
        """One more record, or several."""
        for line in lines if self.callbacks else ():
            record = JobRecord.of(line)
            self._each(lambda callback, record=record: callback.on_record(record))  # type: ignore[misc]

    def end(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """All records are told."""
        if self.callbacks:
            result = summarize(JobRecord.of(line) for line in lines)
            self._each(lambda callback: callback.on_end(result))

    def _each(self, act: Callable[[Callback], None]) -> None:
        self.callbacks = [c for c in self.callbacks if self._tried(type(c).__name__, lambda c=c: act(c))]  # type: ignore[misc]

    def _tried(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except PetalError:
            raise
        except Exception as error:
            warnings.warn(
                f"the run goes on without {name}, which failed: {error}. Repeat the command in the end, and what is missing "
                "there is written from the records", PetalWarning, stacklevel=2,
            )  # fmt: skip
            return False
        return True
