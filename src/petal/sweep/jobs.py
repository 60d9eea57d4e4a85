"""The parts of a sweep, made ready; and one job of it, done in whatever process it is given to."""

import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from petal._files import alone, write_json
from petal.engine import keep_freed_memory
from petal.errors import ConfigError, PetalError, PetalWarning
from petal.recipes.provenance import file_hash
from petal.runs import Experiment, Job, OpenExperiment, Tracking, make_manifest, open_run, read_manifest, run_job, score
from petal.runs.job import describe_job
from petal.runs.records import job_status
from petal.runs.sources import fit_threads

FORMAT = "petal-sweep-1"


@dataclass(frozen=True)
class Task:
    """One job of a sweep with all that a process needs to do it."""

    experiment: Experiment
    job: Job
    folder: Path                            # of the run
    device: str = "cpu"
    checkpoint_every: int | None = None
    tracking: Tracking | None = None

    @property
    def name(self) -> str:
        """What the job is called on the screen."""
        return f"{self.experiment.recipe}/{self.job.id}"

    @property
    def place(self) -> Path:
        """The job's own folder."""
        return self.folder / "jobs" / self.job.id

    @property
    def done(self) -> bool:
        """True once there is nothing left to do."""
        return job_status(self.place) == "done"


@dataclass(frozen=True)
class Part:
    """The jobs of one recipe, which share data and source: a run's folder."""

    experiment: Experiment
    jobs: tuple[Job, ...]
    folder: Path
    device: str = "cpu"
    checkpoint_every: int | None = None
    command: str = ""
    tracking: Tracking | None = None

    @property
    def name(self) -> str:
        """Its recipe."""
        return str(self.experiment.recipe)


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its scores, or why it failed."""

    name: str
    scores: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ready:
    """A part made ready: its tasks, and how many batches each has. Or why it cannot be run."""

    tasks: tuple[Task, ...] = ()
    batches: Mapping[str, int] = field(default_factory=dict)
    failed: str = ""
    warnings: tuple[str, ...] = ()


def read_sweep(folder: Path) -> dict[str, Any]:
    """What a sweep's folder says about itself; an empty sweep if there is none."""
    path = folder / "sweep.json"
    if (folder / "manifest.json").exists():
        raise ConfigError(f"{folder} is the folder of a run, whose reports would not show this sweep: give another --out")
    if not path.exists():
        return {"format": FORMAT, "created": datetime.now(UTC).isoformat(timespec="seconds"), "runs": {}}
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if about["format"] != FORMAT or not isinstance(about["runs"], dict):
            raise ValueError(f"its format is {about['format']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not that of a sweep: {error}. Give another --out") from error
    return about


def what_is_left(folder: Path, parts: Sequence[Part]) -> list[Part]:
    """The parts that have something left to do, or are set otherwise than before: `prepare` tells whether that can be."""
    before = read_sweep(folder)["runs"]
    return [part for part in parts if not _same(before.get(part.name), part.experiment) or not _all_done(part)]


def _same(before: dict[str, Any] | None, experiment: Experiment) -> bool:
    """True if an experiment was set like this; what an older version did not know had its default."""
    return before is not None and {**asdict(Experiment(experiment.recipe)), **before} == asdict(experiment)


def write_sweep(folder: Path, parts: Sequence[Part], command: str) -> None:
    """Note parts that are ready in the sweep's folder."""
    with alone(folder):
        about = read_sweep(folder)
        runs = {**about["runs"], **{part.name: asdict(part.experiment) for part in parts}}
        write_json(folder / "sweep.json", {"command": command, **about, "runs": runs})


def _all_done(part: Part) -> bool:
    try:
        manifest = read_manifest(part.folder)
    except ConfigError:
        return False
    for key in ("weights", "posterior", "statistics", "plugin"):      # the files may have changed where they are
        path, was = getattr(part.experiment, key), manifest.get(key, {}).get("sha256")
        if path is not None and Path(path).is_file() and file_hash(path) != was:
            return False
    known = {job["id"]: job for job in manifest["jobs"]}
    return all(
        known.get(job.id) == describe_job(job) and job_status(part.folder / "jobs" / job.id) == "done" for job in part.jobs
    )


def prepare(part: Part) -> Ready:
    """Make a part's source if it has none, try every row, write the manifest: before an hour goes into anything."""
    fit_threads(part.experiment.chosen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PetalWarning)
        try:
            experiment = part.experiment.with_source(part.folder / "source", torch.device(part.device))
            opened = opened_once(experiment, part.device)
            opened.check(list({job.row.name: job.row for job in part.jobs}.values()))
            manifest = make_manifest(opened, part.jobs, part.command)
            lengths = {number: len(opened.stream(number)) for number in manifest["orders"]}
            open_run(part.folder, manifest)
        except PetalError as error:
            return Ready(failed=str(error), warnings=_texts(caught))
        rest = (part.folder, part.device, part.checkpoint_every, part.tracking)
        tasks = tuple(Task(experiment, job, *rest) for job in part.jobs)
        return Ready(tasks, {task.name: lengths[task.job.order] for task in tasks}, warnings=_texts(caught))


def work(task: Task, tick: Callable[[], None] | None = None) -> Outcome:
    """Do a job, or finish it, or find that it is done. What petal refuses is an outcome; anything else is raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PetalWarning)
        try:
            opened = opened_once(task.experiment, task.device)
            progress = None if tick is None else lambda _: tick()
            records = run_job(
                task.job, task.folder, opened, checkpoint_every=task.checkpoint_every, progress=progress,
                callbacks=task.tracking,
            )  # fmt: skip
        except PetalError as error:
            return Outcome(task.name, failed=str(error), warnings=_texts(caught))
        return Outcome(task.name, score(records), warnings=_texts(caught))


def in_turn(tasks: Sequence[Task], tick: Callable[[], None]) -> Iterator[Outcome]:
    """The jobs one after the other, in this process. Whatever one raises, the others go on."""
    for task in tasks:
        try:
            outcome = work(task, tick)
        except Exception as error:
            outcome = Outcome(task.name, failed="".join(traceback.format_exception(error)).strip())
        yield outcome


@lru_cache(maxsize=2)
def opened_once(experiment: Experiment, device: str) -> OpenExperiment:
    """Data and source, read once for all the jobs that a process gets."""
    fit_threads(experiment.chosen)
    if device == "cpu":
        keep_freed_memory()
    return experiment.open(torch.device(device))


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, PetalWarning)))
