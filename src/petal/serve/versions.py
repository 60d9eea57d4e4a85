"""Versions: snapshots of the adapter's whole state, of which the newest stay, as petal checkpoints in a folder.

Version 0 is the state before any adaptation and is always there. Numbers only grow: after a roll back to 200 the next
version is not 201 if that was in use before, so that a number in an answer means one set of weights for ever.
"""

import logging
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from petal._files import left_behind
from petal._random import random_state, set_random_state
from petal.checkpoint import CheckpointError, DamagedCheckpoint, load, save
from petal.errors import PetalError
from petal.methods import Adapter

log = logging.getLogger(__name__)


class NoVersion(PetalError, LookupError):
    """A version that is not kept."""


@dataclass(frozen=True)
class Version:
    """A version that is kept: why, when, and what the stream looked like then."""

    number: int
    created: float
    reason: str
    confidence: float | None = None
    distance: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


_FILE = re.compile(r"version-(\d+)\.safetensors")


class Versions:
    """The versions in a folder. Those of an earlier process are there too, if they belong to this adapter."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.initial = Version(0, time.time(), "start")
        self._kept: dict[int, Version] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, adapter: Adapter) -> None:
        """Find the versions that an earlier process kept; a damaged file is left out, and what a killed one left goes.

        The adapter and torch's own random numbers end as they were.
        """
        for stale in left_behind(self.folder):
            stale.unlink(missing_ok=True)
        before, generators = adapter.state_dict(), random_state()
        for path in self.folder.glob("version-*.safetensors"):
            if match := _FILE.fullmatch(path.name):
                with suppress(DamagedCheckpoint, KeyError, TypeError):
                    extra = load(adapter, path)
                    self._kept[int(match[1])] = Version(**extra["about"])
        adapter.load_state_dict(before)
        set_random_state(generators)

    def list(self) -> list[Version]:
        """All there are, the oldest first."""
        return [self.initial, *(self._kept[number] for number in sorted(self._kept))]

    def __contains__(self, number: int) -> bool:
        return number == 0 or number in self._kept

    def take(self, adapter: Adapter, about: Version, spare: int | None = None) -> None:
        """Keep the adapter's present state; the oldest beyond `keep` goes, but not the one to `spare`."""
        if about.number in self:
            return
        save(adapter, self._path(about.number), {"about": about.to_json()})
        self._kept[about.number] = about
        for number in sorted(self._kept.keys() - {spare})[: -self.keep]:
            del self._kept[number]
            with suppress(OSError):
                self._path(number).unlink()

    def put_back(self, adapter: Adapter, number: int) -> None:
        """Bring the adapter to a version exactly; it stays as it is if that cannot be."""
        if number == 0:
            adapter.reset()
        elif number in self._kept:
            try:
                load(adapter, self._path(number))
            except CheckpointError as error:
                del self._kept[number]
                log.warning("version %d is lost: %s", number, error)
                raise NoVersion(f"version {number} can no longer be read ({self._there()})") from error
        else:
            raise NoVersion(f"version {number} is not kept ({self._there()})")

    def _there(self) -> str:
        return f"there are: {', '.join(str(v.number) for v in self.list())}"

    def _path(self, number: int) -> Path:
        return self.folder / f"version-{number}.safetensors"
