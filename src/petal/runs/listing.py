"""What is in a folder of runs: what is done, what is running, what goes on when its command is repeated, what is broken.

Nothing is written and nothing is averaged: manifests, states and the number of lines are read, and locks are looked at.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from petal._files import is_taken
from petal.errors import ConfigError, PetalError
from petal.runs.manifest import read_manifest
from petal.source_folder import CONFIG, read_config

STATES = ("done", "running", "resumable", "broken")
SKIPPED = {"jobs", "versions", "images"}        # folders in which nothing is looked for


@dataclass(frozen=True)
class Listed:
    """One thing in a folder of runs. `done` of `total` batches, where they are counted; `note` says why it is broken."""

    path: Path
    kind: str
    state: str
    about: str = ""
    rows: tuple[str, ...] = ()
    orders: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    done: int | None = None
    total: int | None = None
    when: datetime | None = None
    size: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {**plain, "path": str(self.path), "when": None if self.when is None else self.when.isoformat()}


def list_runs(folder: str | Path) -> list[Listed]:
    """Everything below a folder that petal's commands wrote, by path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give one with runs; `petal run` writes to runs/ unless --out says otherwise")
    return sorted(_found(folder), key=lambda one: one.path)


def _found(folder: Path) -> Iterator[Listed]:
    for place, folders, files in os.walk(folder):
        path, there = Path(place), set(files)
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        if "manifest.json" in there:
            yield _run(path)
        elif "job.json" not in there and there & {CONFIG, "training.safetensors", "collecting.safetensors"}:
            found = _source(path, there)
            if found is not None:
                yield found
        elif "audit.jsonl" in there:
            state = "running" if is_taken(path) else "resumable"
            yield Listed(path, "serve", state, when=_when([path / "audit.jsonl"]), size=_size(path))
        elif path.suffix == ".progress" and "state.json" in there:
            yield _unfinished(path)
        for name in sorted(there):
            if name.endswith(".json"):
                found = _file(path / name)
                if found is not None:
                    yield found


def _run(path: Path) -> Listed:
    """A run folder, by its manifest and the states of its jobs."""
    common: dict[str, Any] = {"path": path, "kind": "run", "size": _size(path)}
    try:
        manifest = read_manifest(path)
        jobs = [(str(job["id"]), str(job["row"]), job["order"]) for job in manifest["jobs"]]
        about, orders, seeds = str(manifest["recipe"]), tuple(manifest["orders"]), tuple(manifest["seeds"])
    except (PetalError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, PetalError) else f"the manifest lacks {error}"
        return Listed(**common, state="broken", note=why, when=_when([path / "manifest.json"]))
    states, done, totals, note = list[str](), 0, dict[Any, int](), ""
    for number, _, order in jobs:
        state, lines, total, why = _job(path / "jobs" / number)
        states.append(state)
        done, note = done + lines, note or (f"{number}: {why}" if why else "")
        if total is not None:
            totals.setdefault(order, total)
    known = max(totals.values(), default=None)
    total = None if known is None else sum(totals.get(order, known) for _, _, order in jobs)
    whole = next((s for s in ("broken", "running") if s in states), "done" if set(states) == {"done"} else "resumable")
    records = [path / "jobs" / number / "records.jsonl" for number, _, _ in jobs]
    return Listed(
        **common, state=whole, about=about, rows=tuple(dict.fromkeys(row for _, row, _ in jobs)), orders=orders, seeds=seeds,
        done=done, total=total, when=_when([*records, path / "manifest.json"]), note=note,
    )  # fmt: skip


def _job(place: Path) -> tuple[str, int, int | None, str]:
    """State, batches on disk, batches in all if that is known, and what is wrong."""
    lines = place / "records.jsonl"
    try:
        count = lines.read_bytes().count(b"\n") if lines.is_file() else 0
        if not (place / "job.json").is_file():
            return ("running" if is_taken(place) else "resumable"), count, None, ""
        about = json.loads((place / "job.json").read_text(encoding="utf-8"))
        status, total = about["status"], about["batches"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return "broken", 0, None, f"job.json cannot be read ({error})"
    if status == "done":
        if count != total:
            return "broken", count, total, f"is called done, with {count} of {total} batches"
        return "done", count, total, ""
    return ("running" if is_taken(place) else "resumable"), count, total, ""


def _source(path: Path, there: set[str]) -> Listed | None:
    """A source folder, or the work on one."""
    common: dict[str, Any] = {"path": path, "kind": "source", "size": _size(path), "when": _when([path / n for n in there])}
    unfinished = there & {"training.safetensors", "collecting.safetensors"}
    if unfinished:
        return Listed(**common, state="resumable")
    try:
        config = read_config(path)
    except PetalError as error:
        if "does not describe a source of petal" in str(error):
            return None
        return Listed(**common, state="broken", note=str(error))
    missing = [name for name in config.files if name not in there]
    state, note = ("broken", f"{missing[0]} is missing") if missing else ("done", "")
    return Listed(**common, state=state, about=config.network, note=note)


def _unfinished(path: Path) -> Listed:
    """Predictions that are being written, or were."""
    state, about = "running" if is_taken(path) else "resumable", _json(path / "state.json")
    when = _when([path / "lines.csv", path / "state.json"])
    common: dict[str, Any] = {"path": path.with_suffix(".csv"), "kind": "apply", "when": when, "size": _size(path)}
    if about is None:
        return Listed(**common, state="broken", note="state.json cannot be read")
    return Listed(**common, state=state, about=str(about.get("network")), rows=(str(about.get("method")),))


def _file(path: Path) -> Listed | None:
    """A .json that says of itself what it is."""
    about = _json(path) if path.stat().st_size < 64 * 2**20 else None
    form = None if about is None else about.get("format")
    if about is None or form not in ("petal-apply-1", "petal-tune-2"):
        return None
    if form == "petal-tune-2":
        size, when = path.stat().st_size, _when([path])
        return Listed(path, "tune", "done", str(about.get("recipe")), (str(about.get("row")),), when=when, size=size)
    out = path.with_suffix(".csv")
    if path.parent.suffix == ".progress" or out.with_suffix(".progress").is_dir():
        return None                             # it is listed as unfinished
    state, note = ("done", "") if out.is_file() else ("broken", f"{out.name} is missing")
    size = path.stat().st_size + (out.stat().st_size if out.is_file() else 0)
    row = (str(about.get("method")),)
    return Listed(out, "apply", state, str(about.get("network")), row, when=_when([out, path]), size=size, note=note)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _when(paths: Sequence[Path]) -> datetime | None:
    """When the newest of some files was written."""
    times = [path.stat().st_mtime for path in paths if path.is_file()]
    return datetime.fromtimestamp(max(times), UTC).replace(microsecond=0) if times else None


def _size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue                        # gone since: a checkpoint of a run that is running
    return total
