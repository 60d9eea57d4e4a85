"""The files of `petal run`, read and checked: manifests, records, samples. Nothing is averaged here."""

import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petal.errors import DataError
from petal.report.records import Floats, Records
from petal.report.summaries import Averages, Summary, SummaryFile

FORMAT = "petal-run-1"
SWEEP = "petal-sweep-1"

_NUMBERS = ("error", "nll", "brier", "confidence", "entropy")
_OPTIONAL = {"restored": 0.0, "skipped": 0.0, "visit": 0.0,
             **dict.fromkeys(("seconds", "forwards", "backwards", "distance"), math.nan)}  # fmt: skip


@dataclass(frozen=True)
class SampleImages:
    """A few images of the stream with what was predicted for them."""

    images: NDArray[np.uint8]   # [M, H, W, 3]
    entries: list[dict[str, Any]]


@dataclass(frozen=True)
class JobFolder:
    """One method over one stream: its settings from the manifest, its records; `finished` if it ran to the end."""

    folder: Path
    id: str
    row: str
    method: str
    label: str
    order: str
    seed: str
    options: Mapping[str, Any]
    finished: bool
    total: int | None
    records: Records | None                   # None too where only the summary was kept
    told: Summary | None = None
    averaged: Averages | None = None          # with others, where not even that

    @property
    def batches(self) -> int:
        """Number of batches on disk."""
        return 0 if self.records is None else len(self.records)

    @cached_property
    def summary(self) -> Summary | None:
        """What tables need of it."""
        return self.told if self.records is None else Summary.of(self.records)

    @property
    def pairs(self) -> frozenset[tuple[str, int]] | None:
        """Every (domain, severity) of the stream, as far as is known."""
        known = self.averaged.means if self.averaged is not None else self.summary
        return None if known is None else known.pairs

    def samples(self) -> SampleImages | None:
        """The sample images, if the job kept some."""
        return _read_samples(self.folder, self.finished)


@dataclass(frozen=True)
class RunFolder:
    """A run folder: its manifest and its jobs."""

    path: Path
    manifest: Mapping[str, Any]
    jobs: tuple[JobFolder, ...]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name


def run_folders(path: str | Path) -> list[Path]:
    """The run folders of a sweep that have been started; for any other folder, the folder itself."""
    path = Path(path)
    file = path / "sweep.json"
    if not file.is_file() or (path / "manifest.json").is_file():
        return [path]
    about = _read_object(file)
    runs = about.get("runs")
    if about.get("format") != SWEEP or not isinstance(runs, dict):
        raise DataError(f"{file} has format {about.get('format')!r}; this version reads {SWEEP!r}")
    begun = [path / name for name in runs if (path / name / "manifest.json").is_file()]
    if not begun:
        raise DataError(f"{path}: no run of this sweep has begun")
    return begun


def read_run(path: str | Path) -> RunFolder:
    """Read a run folder. A file that is missing, truncated or not part of a run is a DataError that names it."""
    path = Path(path)
    file = path / "manifest.json"
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give the folder that `petal run` wrote")
    if not file.is_file():
        inside = sorted(p.parent.name for p in path.glob("*/manifest.json"))
        hint = f"; the run folders in it are {', '.join(inside)}" if inside else "; give the folder that `petal run` wrote"
        raise DataError(f"{file} is missing{hint}")
    manifest = _read_object(file)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{file} has format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    jobs = manifest.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        raise DataError(f"{file} lists no jobs")
    for name in ("versions", "data", "weights", "posterior"):
        if not isinstance(manifest.get(name) or {}, dict):
            raise DataError(f"{file}: {name} should be an object; it is {manifest[name]!r}")
    read = tuple(_read_job(path, file, entry) for entry in jobs)
    ids = [job.id for job in read]
    if len(set(ids)) < len(ids):
        raise DataError(f"{file} lists the job {next(i for i in ids if ids.count(i) > 1)!r} twice")
    return RunFolder(path, manifest, read)


def runs_of(file: SummaryFile) -> list[RunFolder]:
    """The runs of a file of summaries, as if their folders were there."""
    try:
        averages: dict[tuple[str, str], Averages] = {}
        for about in file.averages:
            std = {name: float(value) for name, value in about["std"].items() if value is not None}
            found = Averages(int(about["runs"]), Summary.from_json(about), std)
            averages |= dict.fromkeys(map(tuple, about["jobs"]), found)
        return [_told(file.path, run, averages) for run in file.runs]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file.path} is no whole summary: {type(error).__name__}: {error}") from None


def _told(path: Path, run: Mapping[str, Any], averages: Mapping[tuple[str, str], Averages]) -> RunFolder:
    rows = {row["row"]: row for row in run["rows"]}
    folder, jobs, entries = path.with_name(str(run["folder"])), [], []
    for identifier, about in run["jobs"].items():
        row = rows[about["row"]]
        options = dict(row.get("options") or {})
        entries.append({"id": identifier, **row, "order": about["order"], "seed": about["seed"]})
        if row.get("reset_on_domain_change"):
            options["reset_on_domain_change"] = True
        jobs.append(JobFolder(
            folder=folder / "jobs" / identifier, id=identifier, row=str(row["row"]), method=str(row["method"]),
            label=str(row["label"]), order=_plain(about["order"]), seed=_plain(about["seed"]), options=options,
            finished=True, total=about.get("batches"), records=None,
            told=Summary.from_json(about) if "error" in about else None,
            averaged=averages.get((str(run["folder"]), identifier)),
        ))  # fmt: skip
    return RunFolder(folder, {**run["manifest"], "jobs": entries}, tuple(jobs))


def _read_job(run: Path, file: Path, entry: Any) -> JobFolder:
    if not isinstance(entry, dict):
        raise DataError(f"{file}: a job should be an object; one is {entry!r}")
    name = entry.get("id")
    if not isinstance(name, str) or not name or name in {".", ".."} or set(name) & set("/\\\0"):
        raise DataError(f"{file}: a job's id should name a folder; one is {name!r}")
    options = entry.get("options") or {}
    if not isinstance(options, dict):
        raise DataError(f"{file}: the options of job {name!r} should be an object; they are {options!r}")
    row = str(entry.get("row") or entry.get("method") or name)
    folder = run / "jobs" / name
    state, finished, total = folder / "job.json", False, None
    if state.is_file():
        about = _read_object(state)
        if not isinstance(about.get("status"), str):
            raise DataError(f"{state} says no status")
        finished = about["status"] == "done"
        total = about["batches"] if isinstance(about.get("batches"), int) else None
    lines = folder / "records.jsonl"
    if finished and not lines.is_file():
        raise DataError(f"{lines} is missing, though {state} calls the job done")
    records = _read_records(lines, finished) if lines.is_file() else None
    if finished and records is None:
        raise DataError(f"{lines} is empty, though {state} calls the job done")
    if finished and total is not None and records is not None and total != len(records):
        raise DataError(f"{lines} has {len(records)} records; {state} says {total}")
    if entry.get("reset_on_domain_change"):
        options = {**options, "reset_on_domain_change": True}
    return JobFolder(
        folder=folder, id=name, row=row, method=str(entry.get("method") or row), label=str(entry.get("label") or row),
        order=_plain(entry.get("order")), seed=_plain(entry.get("seed")), options=options, finished=finished,
        total=total, records=records,
    )  # fmt: skip


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    return "" if value is None else str(value)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} is missing") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text; it was not written by `petal run`, or is damaged") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{file} is not whole JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} should hold one JSON object")
    return value


def _lines(file: Path, finished: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    text = _read_text(file)
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    elif not finished:
        lines.pop()   # of a job that was killed while it wrote; `petal run` repeats that batch
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{file}, line {number} is not whole JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataError(f"{file}, line {number} should be an object")
        yield number, value


def _read_records(file: Path, finished: bool) -> Records | None:
    columns: dict[str, list[Any]] = {name: [] for name in Records.__dataclass_fields__}
    previous, shape = -1, None
    for number, value in _lines(file, finished):
        where = f"{file}, line {number}"
        position = _whole(where, value, "position")
        if position <= previous:
            raise DataError(f"{where}: batch {position} comes after batch {previous}; two runs wrote it, or it was edited")
        previous = position
        n = _whole(where, value, "n")
        if n < 1:
            raise DataError(f"{where}: a batch of {n} samples")
        domain = value.get("domain")
        if not isinstance(domain, str) or not domain:
            raise DataError(f"{where}: the domain should be a name; it is {domain!r}")
        counts = _calibration(where, value.get("calibration"))
        shape = counts.shape if shape is None else shape
        if counts.shape != shape:
            raise DataError(f"{where}: {counts.shape[1]} calibration bins, {shape[1]} in the lines before")
        if not abs(counts[0].sum() - n) < 0.5:
            raise DataError(f"{where}: the calibration counts sum to {counts[0].sum():g} samples; the batch has {n}")
        columns["position"].append(position)
        columns["domain"].append(domain)
        columns["severity"].append(_whole(where, value, "severity", 0))
        columns["n"].append(n)
        columns["calibration"].append(counts)
        columns["views_used"].append(float(bool(value.get("views_used"))))
        guard = value.get("guard")
        columns["learned"].append(float(value.get("learned", True) is not False))
        columns["alarms"].append(_number(f"{where}: guard", guard, "alarms", 0.0) if isinstance(guard, dict) else 0.0)
        for name in _NUMBERS:
            columns[name].append(_number(where, value, name))
        for name, default in _OPTIONAL.items():
            columns[name].append(_number(where, value, name, default))
    if not columns["position"]:
        return None
    names = columns.pop("domain")
    arrays: dict[str, Any] = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    arrays["domain"] = np.array(names)
    for name in ("position", "severity"):
        arrays[name] = arrays[name].astype(np.int64)
    return Records(**arrays)


def _whole(where: str, value: Mapping[str, Any], name: str, default: int | None = None) -> int:
    found = value.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise DataError(f"{where}: {name} should be a whole number; it is {found!r}")
    return found


def _number(where: str, value: Mapping[str, Any], name: str, default: float | None = None) -> float:
    found = value.get(name)
    if found is None and default is not None:
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise DataError(f"{where}: {name} should be a number; it is {found!r}")
    return float(found)


def _calibration(where: str, value: Any) -> Floats:
    try:
        counts = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        counts = np.zeros(0)
    if counts.ndim != 2 or counts.shape[0] != 3 or not counts.shape[1]:
        raise DataError(f"{where}: calibration should be three rows of counts, one entry per bin")
    return counts


def _read_samples(folder: Path, finished: bool) -> SampleImages | None:
    description, arrays = folder / "samples.json", folder / "samples.npz"
    if not (description.is_file() and arrays.is_file()):  # a copied run may come without its images
        return None
    try:
        entries = json.loads(_read_text(description))
    except json.JSONDecodeError as error:
        raise DataError(f"{description} is not whole JSON: {error}") from None
    try:
        with np.load(arrays, allow_pickle=False) as file:
            images = file["images"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{arrays} holds no readable `images`: {error}") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise DataError(f"{arrays}: images should be 8-bit [M, H, W, 3]; they are {images.dtype} {list(images.shape)}")
    good = isinstance(entries, list) and all(isinstance(e, dict) and isinstance(e.get("domain"), str) for e in entries)
    if not good or (finished and len(entries) != len(images)):
        raise DataError(f"{description} should describe the {len(images)} images of {arrays.name} one by one")
    both = min(len(entries), len(images))   # killed between the two files: their first entries belong together
    if not both:
        return None
    images = images[:both]
    return SampleImages(np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images, entries[:both])
