"""What a job leaves on disk after every batch, and how it is read back."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from petal._files import writing
from petal.errors import PetalWarning, StorageError
from petal.guard import Guard
from petal.methods import Adapter
from petal.recipes.settings import as_json


class Lines:
    """A file that lines are added to. While the disk takes none they wait in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("ab", buffering=0)
        self.waiting = bytearray()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *failure: object) -> None:
        self.file.close()

    def add(self, line: str) -> None:
        """One more line; it is with the system when this returns, or waits."""
        self.waiting += line.encode() + b"\n"
        goes_on(self.flush)

    def flush(self) -> None:
        """Hand over the lines that wait."""
        with writing(self.path):
            while self.waiting:
                del self.waiting[: self.file.write(self.waiting) or 0]

    def sync(self) -> None:
        """All lines are on the disk when this returns."""
        self.flush()
        with writing(self.path):
            os.fsync(self.file.fileno())


def goes_on(*work: Callable[[], None]) -> bool:
    """True if files could be written; if not, the user is told, and the run goes on: hours of work need not be lost."""
    try:
        for part in work:
            part()
    except StorageError as error:
        warnings.warn(f"the run goes on, and will try again: {error}", PetalWarning, stacklevel=3)
        return False
    return True


def guard_record(guard: Guard) -> dict[str, Any]:
    """What a guard has to say after a batch: whether learning is off, its alarms so far, its signals if it looked."""
    found: dict[str, Any] = {"frozen": guard.frozen, "alarms": len(guard.alarms), "pulls": guard.pulls}
    if guard.looked:
        found["signals"] = {k: v if math.isfinite(v) else None for k, v in guard.status().items()}
        if guard.alarms and guard.alarms[-1].step == guard.batches:
            found["alarm"] = {k: as_json(v) if not isinstance(v, float) or math.isfinite(v) else None
                              for k, v in asdict(guard.alarms[-1]).items()}  # fmt: skip
    return found


def distance_from_start(adapter: Adapter) -> Callable[[], float] | None:
    """Root mean square distance, over all of the network's parameters, between the student and where it started."""
    if not adapter.adapted:
        return None
    start = adapter.origin()
    origin = [start[name] for name in adapter.adapted]
    count = sum(p.numel() for p in adapter.model.parameters())

    def distance() -> float:
        with torch.no_grad():
            moved = torch._foreach_sub([p.detach() for p in adapter.adapted.values()], origin)
            return math.sqrt(float(torch.stack(torch._foreach_norm(moved)).double().square().sum()) / count)

    return distance


def job_status(place: Path) -> str | None:
    """What the folder of a job says: "running", "done", or None if it was never begun."""
    try:
        return str(json.loads((place / "job.json").read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError):
        return None


def complete_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a file and where each line ends, up to the first that is torn or out of order."""
    records: list[dict[str, Any]] = []
    ends: list[int] = []
    if not path.exists():
        return records, ends
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(record, dict) or record.get("position") != len(records):
            break
        records.append(record)
        ends.append(end)
    return records, ends


def read_records(place: str | Path) -> list[dict[str, Any]]:
    """The records in a job's folder."""
    return complete_lines(Path(place) / "records.jsonl")[0]


def score(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Error, NLL and Brier score over all images of these records.

    >>> score([{"n": 1, "error": 1.0, "nll": 2.0, "brier": 1.0}, {"n": 3, "error": 0.0, "nll": 0.0, "brier": 0.0}])
    {'error': 0.25, 'nll': 0.5, 'brier': 0.25}
    """
    n = sum(r["n"] for r in records)
    return {key: sum(r[key] * r["n"] for r in records) / max(n, 1) for key in ("error", "nll", "brier")}
