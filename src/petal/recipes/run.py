"""Running a table: a folder with a manifest, and a folder for each job with one JSON line a batch.

    RUN/manifest.json               format "petal-run-1": everything that was set, versions, hashes, and the jobs
    RUN/jobs/ID/job.json            the job's settings as used, "status" ("running", "done"), batches, seconds
    RUN/jobs/ID/records.jsonl       a `petal.Record` a batch, with "distance", "row", "order" and "seed"; "visit" in a
                                    recurring stream; "guard" (frozen, alarms, pulls, signals, alarm) where there is one
    RUN/jobs/ID/samples.json        [{"domain", "severity", "position", "index", "label", "predicted", "probability"},
                                    ...]: the first images of each domain
    RUN/jobs/ID/samples.npz         "images" uint8 [n, H, W, 3], in the order of samples.json
    RUN/jobs/ID/checkpoint-*.safetensors    while it runs

A job that was interrupted, at whatever moment, continues from its last checkpoint: lines after it are cut off and made
again, by the same state and the same stream, so they are the same.
"""

import gc
import hashlib
import inspect
import json
import math
import os
import platform
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from petal._files import alone, replacing
from petal._version import __version__
from petal.checkpoint import Checkpoints
from petal.data import STREAMS, Batch, CorruptedDataset, Dataset, Stream
from petal.engine import accelerate, policy_for
from petal.errors import ConfigError, DataError, PetalWarning, StorageError
from petal.evaluate import evaluate_batch
from petal.guard import Guard
from petal.methods import METHODS, Adapter
from petal.methods.mean_teacher import MeanTeacher
from petal.models import check_input
from petal.parallel import ParallelError, Ranks, parallelize
from petal.posterior import DiagonalGaussian
from petal.recipes.published import Recipe
from petal.recipes.row import Row
from petal.recipes.rows import WRAPPERS, needs_posterior
from petal.recipes.settings import as_json, options_of

FORMAT = "petal-run-1"
SAMPLES = 4                                 # images kept of each domain
DONE = -1                                   # what ranks are told instead of a position when a job is done
SECONDS = 20.0                              # between checkpoints, unless the user counts batches


@dataclass(frozen=True)
class Job:
    """One row over one order with one seed."""

    row: Row
    order: int = 1
    seed: int = 0

    @property
    def id(self) -> str:
        """Name of the job's folder."""
        return f"{self.row.name}-o{self.order}-s{self.seed}"


@dataclass(frozen=True)
class Progress:
    """Where a job stands, after every batch: means are over all images so far."""

    job: Job
    position: int
    batches: int
    record: dict[str, Any] | None
    error: float
    resumed: bool = False


@dataclass
class Bench:
    """What the jobs of a run share: recipe, data, source network, posterior, and how things are executed."""

    recipe: Recipe
    data: Dataset
    model: nn.Module
    posterior: DiagonalGaussian | None = None
    fidelity: str = "official"
    severity: int | None = None
    batch_size: int | None = None
    images: int | None = None
    engine: str = "auto"
    visits: int | None = None               # a recurring stream: all domains again and again
    label_correlation: float | None = None  # Dirichlet concentration: labels come in runs, the longer the smaller it is
    stream_seed: int = 0                    # of the corruptions' noise: the same data whatever a job's seed
    ranks: Ranks | None = None              # the processes that share out the views, if there are several
    compiled_for: str = field(default="", repr=False)       # the method whose programs torch holds
    _checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.severity is not None and self.recipe.severity is None:
            raise ConfigError(f"{self.recipe.name} goes through all severities: leave the severity out")
        for name, value in (("visits", self.visits), ("label_correlation", self.label_correlation)):
            if value is not None and self.recipe.stream != "continual":
                raise ConfigError(f"{name} changes a continual stream; that of {self.recipe.name} is {self.recipe.stream}")
        if self.visits is not None and self.label_correlation is not None:
            raise ConfigError("a stream recurs (visits) or has labels in runs (label_correlation): leave one of them out")
        self.severity = self.recipe.severity if self.severity is None else self.severity
        self.batch_size = self.batch_size or self.recipe.batch_size

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @property
    def stream_name(self) -> str:
        """Which of the `STREAMS`."""
        if self.visits is not None:
            return "recurring"
        return self.recipe.stream if self.label_correlation is None else "correlated"

    def names(self, number: int) -> tuple[str, ...]:
        """The corruptions of a published order."""
        return self.recipe.order(number)

    def stream(self, number: int) -> Stream:
        """The stream of an order. Clean images are corrupted on the network's device, corrupted ones read ahead."""
        ready = isinstance(self.data, CorruptedDataset)
        options: dict[str, Any] = {} if self.severity is None else {"severity": self.severity}
        if self.visits is not None:
            options["visits"] = self.visits
        if self.label_correlation is not None:
            options["concentration"] = self.label_correlation
        return STREAMS[self.stream_name](
            self.data, self.names(number), batch_size=self.batch_size, images=self.images, seed=self.stream_seed,
            profile=self.recipe.profile, device=None if ready else self.device, prefetch=2 if ready else 0, **options,
        )  # fmt: skip

    def adapter(self, row: Row, seed: int) -> Adapter:
        """The row's method around the source network, PETAL at the mean of its posterior."""
        method = METHODS[row.method]
        arguments: list[Any] = [self.model]
        if needs_posterior(method):
            if self.posterior is None:
                raise ConfigError(f"{row.label} needs the source posterior: make one with `petal fit`, give --posterior")
            arguments.append(self.posterior)
        options = dict(row.options)
        if "seed" in _parameters(method):
            options["seed"] = seed
        adapter = method(*arguments, **options)
        if self.ranks is not None and isinstance(adapter, MeanTeacher):
            parallelize(adapter, self.ranks)
        for name in row.wraps:
            adapter = WRAPPERS[name](adapter, **row.wrapper_options.get(name, {}))
        # Which program runs a batch must not depend on how many came before it: a resumed run gives the same numbers. So
        # the shape of a whole batch is compiled from the first one on, and on a CPU, where that takes long, nothing is.
        if adapter.device.type == "cuda":
            return accelerate(adapter, self.engine, batch_shape=self.batch_shape())
        return accelerate(adapter, self.engine, policy=replace(policy_for(adapter.device), compile=False))

    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a whole batch of the stream."""
        data: Dataset = self.data
        if isinstance(data, CorruptedDataset):
            data = data.corrupted(self.names(1)[0], self.severity or 5)
        assert self.batch_size is not None
        return (min(self.batch_size, self.images or len(data)), *data.batch([0])[0].shape[1:])

    def check_pixels(self, x: Tensor) -> None:
        """Warn, once, if the images do not look like what the network was trained on."""
        if not self._checked:
            self._checked = True
            check_input(self.model, x)


def jobs_for(rows: Iterable[Row], orders: Sequence[int], seeds: Sequence[int]) -> list[Job]:
    """All jobs of a run. Rows that draw no random numbers give the same for every seed, and run once, with seed 0.

    Always the same one: a seed that is added later would bring the same runs again, and averages would count them twice.
    """
    return [Job(row, number, seed) for row in rows for number in orders for seed in (seeds if row.random else [0])]


# -- the run's folder --------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    out = {"petal": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return out | {"numpy": np.__version__, "platform": platform.platform()}


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(path: str | Path | None) -> dict[str, Any]:
    """A file's path and hash."""
    if path is None:
        return {}
    path = Path(path)
    return {"path": str(path), "sha256": file_hash(path)} if path.is_file() else {"path": str(path)}


def make_manifest(
    bench: Bench,
    jobs: Sequence[Job],
    *,
    weights: str | Path | None = None,
    posterior: str | Path | None = None,
    data: str | Path | None = None,
    command: str = "",
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about a run, as plain data. A stream that cannot be made is an error here, before there is a folder."""
    device = bench.device
    orders = sorted({job.order for job in jobs})
    for number in orders:
        bench.stream(number)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "format": FORMAT,
        "recipe": bench.recipe.name,
        "title": bench.recipe.title,
        "fidelity": bench.fidelity,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(),
        "device": device.type,
        "device_name": name,
        "engine": bench.engine,
        "seeds": sorted({job.seed for job in jobs}),
        "orders": orders,
        "order_names": {str(n): list(bench.names(n)) for n in orders},
        "stream": bench.stream_name,
        "stream_seed": bench.stream_seed,
        "severity": bench.severity,
        "batch_size": bench.batch_size,
        "images": bench.images,
        "visits": bench.visits,
        "label_correlation": bench.label_correlation,
        "network": bench.recipe.network,
        "classes": list(bench.data.classes) if bench.data.classes else bench.recipe.classes,
        "data": {**described(data), "fingerprint": bench.data.fingerprint()},
        "weights": described(weights),
        "posterior": described(posterior),
        **(extra or {}),
        "jobs": [describe_job(job) for job in jobs],
    }


def describe_job(job: Job) -> dict[str, Any]:
    """A job with all its settings as used: those of the row, and the constructor's defaults for the rest."""
    row = job.row
    options = {**_defaults(METHODS[row.method]), **row.options}
    for name in row.wraps:
        options[name] = {**_defaults(WRAPPERS[name]), **row.wrapper_options.get(name, {})}
    return {
        "id": job.id,
        "row": job.row.name,
        "method": job.row.method,
        "label": job.row.label,
        "order": job.order,
        "seed": job.seed,
        "reset_on_domain_change": job.row.reset_on_domain_change,
        "options": as_json(options),
    }


def _defaults(method: type[Adapter]) -> dict[str, Any]:
    return {k: p.default for k, p in options_of(method).items() if p.default is not p.empty}


SAME = ("recipe", "fidelity", "device", "engine", "stream", "stream_seed", "severity", "batch_size", "images", "network",
        "visits", "label_correlation")  # fmt: skip


def open_run(folder: str | Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Start a run's folder, or continue one: jobs it has are kept, new ones are added. Returns what is now there.

    A folder of a run with other settings is refused, with the differences.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if (folder / "sweep.json").exists():
        raise ConfigError(f"{folder} is the folder of a sweep, whose reports would not show this run: give another --out")
    make_folder(folder / "jobs")
    with alone(folder):                     # another may be adding jobs of its own
        if path.exists():
            manifest = _merged(read_manifest(folder), manifest, folder)
        write_json(path, manifest)
    return manifest


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a run; an error if there is none or it is not one."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the manifest of a run: its format is not {FORMAT!r}")
    return manifest


def _merged(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    differences = [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in SAME if old.get(key) != new.get(key)]
    for key, part in (("data", "fingerprint"), ("weights", "sha256"), ("posterior", "sha256"), ("plugin", "sha256")):
        was, now = (m.get(key, {}).get(part) for m in (old, new))
        if was != now and not (key in ("posterior", "plugin") and None in (was, now)):
            differences.append(f"{key} was {_short(was)} and is {_short(now)}")
    jobs = {job["id"]: job for job in old["jobs"]}
    for job in new["jobs"]:
        known = jobs.setdefault(job["id"], job)
        for key, value in job["options"].items():
            if known["options"].get(key) != value:
                differences.append(f"{job['row']}.{key} was {known['options'].get(key)!r} and is {value!r}")
    if differences:
        listed = "; ".join(dict.fromkeys(differences))
        raise ConfigError(f"{folder} holds a run with other settings: {listed}. Give another --out, or the same settings")
    if old["versions"] != new["versions"]:
        changed = [k for k in new["versions"] if old["versions"].get(k) != new["versions"][k]]
        text = f"the run in {folder} was begun with another version of {', '.join(changed)}"
        warnings.warn(text, PetalWarning, stacklevel=3)
    out = {**old, "jobs": list(jobs.values()), "order_names": {**old["order_names"], **new["order_names"]}}
    for key in ("posterior", "plugin"):
        if new.get(key):
            out[key] = new[key]
    for key in ("seeds", "orders"):
        out[key] = sorted({*old[key], *new[key]})
    return out


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def make_folder(path: Path) -> None:
    """A folder, unless it is there."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, content: Any) -> None:
    """A JSON file that appears whole or not at all."""
    with _writing(path), replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


# -- one job -----------------------------------------------------------------------------------------------------------


def run_job(
    job: Job,
    folder: str | Path,
    bench: Bench,
    *,
    checkpoint_every: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[dict[str, Any]]:
    """Run a job in its folder RUN/jobs/ID, or finish it, or just read it if it is done. Returns its records.

    `stop` is asked after every batch: when it says yes, a checkpoint is written and the job is left for a later call.

    `checkpoint_every` is a number of batches; without one, checkpoints are written about every 20 seconds, and less often
    where writing them takes long. Of several ranks the first does all this; the others take the same steps, write nothing
    and return no records.
    """
    ranks = bench.ranks
    if ranks is not None and not ranks.first:
        _follow(job, bench, ranks, progress, stop)
        return []
    place = Path(folder) / "jobs" / job.id
    make_folder(place)
    with alone(place, f"another process is running the job in {place}"):
        if job_status(place) == "done":
            Checkpoints(place).clear()      # in case it was killed between its last two lines
            records = read_records(place)
            if ranks is not None:
                ranks.exchange([DONE])
            if progress is not None:
                progress(Progress(job, len(records), len(records), None, score(records)["error"], resumed=True))
            return records
        for stale in place.glob(".*.tmp"):  # of a process that was killed while it wrote
            stale.unlink()
        return _Running(job, place, bench, checkpoint_every, progress, stop).run()


def _follow(
    job: Job,
    bench: Bench,
    ranks: Ranks,
    progress: Callable[[Progress], None] | None,
    stop: Callable[[], bool] | None,
) -> None:
    """The job as every rank but the first sees it. Methods without views are computed by all of them."""
    adapter, stream = bench.adapter(job.row, job.seed), bench.stream(job.order)
    position = ranks.start(adapter)
    if position == DONE:
        position = len(stream)
    for batch in stream.at(position) if position < len(stream) else ():
        if job.row.reset_on_domain_change and batch.domain_changed:
            adapter.reset()
        adapter(batch.x.to(adapter.device))
        position += 1
        if stop is not None and stop():
            break
    if progress is not None:
        progress(Progress(job, position, len(stream), None, 0.0))


class _Running:
    """A job while it runs."""

    def __init__(
        self,
        job: Job,
        place: Path,
        bench: Bench,
        every: int | None,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.stop = stop or (lambda: False)
        self.job, self.place, self.bench, self.every, self.progress = job, place, bench, every, progress
        gc.collect()                        # the last job's adapter, whose parts hold each other, and what it has on a GPU
        if bench.device.type == "cuda" and bench.compiled_for != job.row.method:
            torch.compiler.reset()          # torch compiles no more beyond a number of programs: let go the others
        bench.compiled_for = job.row.method
        self.adapter = bench.adapter(job.row, job.seed)
        self.distance = distance_from_start(self.adapter)
        self.stream = bench.stream(job.order)
        self.checkpoints = Checkpoints(place)
        self.samples = Samples(place, self.stream)
        self.logits: Tensor | None = None
        self.seconds = 0.0
        self.wait, self.last = SECONDS, time.monotonic()
        self.about = {**describe_job(job), "batches": len(self.stream), "fingerprint": self.stream.fingerprint()}

    def run(self) -> list[dict[str, Any]]:
        path = self.place / "records.jsonl"
        records = self.resume(path)
        wrong, seen = sum(r["error"] * r["n"] for r in records), sum(r["n"] for r in records)
        start = len(records)
        write_json(self.place / "job.json", {**self.about, "status": "running", "seconds": self.seconds})
        if self.progress is not None:
            self.progress(Progress(self.job, start, self.stream.batches or 0, None, wrong / max(seen, 1), start > 0))
        ranks = self.bench.ranks
        if ranks is not None:
            ranks.start(self.adapter, start)
        hook = self.adapter.register_forward_hook(self._keep)
        whole_batches = nullcontext() if ranks is None else ranks.finishing_batches()
        with Lines(path) as lines, self.checkpoints, whole_batches:
            for batch in self.stream.at(start):
                began = time.monotonic()
                try:
                    record = self.step(batch)
                except ParallelError as error:
                    raise self.lost(error, lines, len(records)) from error
                records.append(record)
                lines.add(json.dumps(record))
                self.seconds += time.monotonic() - began
                wrong, seen = wrong + record["error"] * record["n"], seen + record["n"]
                if self.progress is not None:
                    self.progress(Progress(self.job, len(records), self.stream.batches or 0, record, wrong / seen))
                last = len(records) == self.stream.batches
                stopping = self.stop() and not last
                if stopping or self.due(len(records), start):
                    self.checkpoint(len(records), lines)
                if stopping:
                    hook.remove()
                    return records
                if ranks is not None and ranks.stopping:
                    raise self.lost(ParallelError("the launcher ended this run"), lines, len(records))
            lines.sync()
        hook.remove()
        self.samples.write()
        write_json(self.place / "job.json", {**self.about, "status": "done", "seconds": self.seconds})
        self.checkpoints.clear()
        return records

    def resume(self, path: Path) -> list[dict[str, Any]]:
        """Put the adapter where its last checkpoint was, and cut the records off there."""
        records, ends = complete_lines(path)
        extra = self.checkpoints.load_latest(self.adapter, lambda e: e["position"] <= len(records))
        if extra is None:
            self.checkpoints.clear()
        elif extra["fingerprint"] != self.stream.fingerprint():
            raise DataError(f"{self.place} has a checkpoint of another stream: give another --out, or the same data")
        position = 0 if extra is None else int(extra["position"])
        self.seconds = 0.0 if extra is None else float(extra["seconds"])
        if path.exists():
            with path.open("rb+") as file:
                file.truncate(ends[position - 1] if position else 0)
        self.samples.resume(position)
        return records[:position]

    def step(self, batch: Batch) -> dict[str, Any]:
        if self.job.row.reset_on_domain_change and batch.domain_changed:
            self.adapter.reset()
        self.bench.check_pixels(batch.x)
        record = evaluate_batch(self.adapter, batch, batch.position).to_json()
        if self.logits is not None:
            self.samples.take(batch, self.logits)
        if self.distance is not None:
            record["distance"] = self.distance()
        if self.bench.visits is not None:
            record["visit"] = batch.visit
        if isinstance(self.adapter, Guard):
            record["guard"] = guard_record(self.adapter)
        return {**record, "row": self.job.row.name, "order": self.job.order, "seed": self.job.seed}

    def _keep(self, adapter: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> None:
        self.logits = logits

    def lost(self, error: ParallelError, lines: "Lines", position: int) -> ParallelError:
        """The error to end with when another rank is gone, after a checkpoint of the last whole batch.

        With several steps a batch, or something around the method, the state may be that of half a batch: then the last
        checkpoint is the one there is.
        """
        if isinstance(self.adapter, MeanTeacher) and self.adapter.steps == 1:
            self.checkpoint(position, lines)
        return ParallelError(
            f"{error}. {self.job.id} stood at batch {position} of {self.about['batches']} in {self.place}: repeat the "
            "command to continue at its last checkpoint, with as many ranks as you like"
        )

    def due(self, position: int, start: int) -> bool:
        if self.every is not None:
            return (position - start) % self.every == 0
        return time.monotonic() - self.last > self.wait

    def checkpoint(self, position: int, lines: "Lines") -> None:
        """What lies before the position must be on the disk when the checkpoint says so."""
        began = time.monotonic()
        if _goes_on(lines.sync, self.samples.write):
            extra = {"position": position, "seconds": self.seconds, "fingerprint": self.stream.fingerprint()}
            self.checkpoints.save(self.adapter, extra)
        self.last = time.monotonic()
        self.wait = max(SECONDS, 20 * max(self.last - began, self.checkpoints.seconds))


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
        _goes_on(self.flush)

    def flush(self) -> None:
        """Hand over the lines that wait."""
        with _writing(self.path):
            while self.waiting:
                del self.waiting[: self.file.write(self.waiting) or 0]

    def sync(self) -> None:
        """All lines are on the disk when this returns."""
        self.flush()
        with _writing(self.path):
            os.fsync(self.file.fileno())


def _goes_on(*work: Callable[[], None]) -> bool:
    """Whether files could be written; if not, the user is told, and the run goes on: hours of work need not be lost."""
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
    source = getattr(adapter, "source", None)
    if isinstance(source, nn.Module):
        origin = [p.detach() for p in source.parameters()]
    else:
        origin = [p.detach().clone() for p in adapter.adapted.values()]
    count = sum(p.numel() for p in adapter.model.parameters())

    def distance() -> float:
        with torch.no_grad():
            moved = torch._foreach_sub([p.detach() for p in adapter.adapted.values()], origin)
            return math.sqrt(float(torch.stack(torch._foreach_norm(moved)).double().square().sum()) / count)

    return distance


@dataclass
class Sample:
    """One image with what was made of it."""

    domain: str
    severity: int
    position: int
    index: int
    label: int
    predicted: int
    probability: float


class Samples:
    """The first images of each domain, at its highest severity, with their predictions."""

    def __init__(self, place: Path, stream: Stream) -> None:
        self.place = place
        highest: dict[str, int] = {}
        for domain, severity in stream.domains:
            highest[domain] = max(severity, highest.get(domain, 0))
        self.wanted = set(highest.items())
        self.samples: list[Sample] = []
        self.images: list[np.ndarray[Any, Any]] = []
        self.written = 0

    def take(self, batch: Batch, logits: Tensor) -> None:
        """Keep some of a batch if it is the first of its domain."""
        if (batch.domain, batch.severity) not in self.wanted:
            return
        self.wanted.discard((batch.domain, batch.severity))
        probability, predicted = logits[:SAMPLES].softmax(1).max(1)
        images = batch.x[:SAMPLES].mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        for i, image in enumerate(images):
            self.images.append(image)
            self.samples.append(
                Sample(batch.domain, batch.severity, batch.position, int(batch.index[i]), int(batch.y[i]),
                       int(predicted[i]), float(probability[i]))
            )  # fmt: skip

    def write(self) -> None:
        """Both files, if there is anything new; the pictures first, so that every line has its picture."""
        if len(self.samples) == self.written:
            return
        path = self.place / "samples.npz"
        with _writing(path), replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, images=np.stack(self.images))
        write_json(self.place / "samples.json", [asdict(sample) for sample in self.samples])
        self.written = len(self.samples)

    def resume(self, position: int) -> None:
        """Those taken before a position; what was taken later is taken again."""
        try:
            listed = json.loads((self.place / "samples.json").read_text(encoding="utf-8"))
            with np.load(self.place / "samples.npz", allow_pickle=False) as archive:
                images = archive["images"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return
        for entry, image in zip(listed, images, strict=False):
            if entry["position"] < position:
                self.samples.append(Sample(**entry))
                self.images.append(image)
                self.wanted.discard((entry["domain"], entry["severity"]))


def job_status(place: Path) -> str | None:
    """What the folder of a job says: "running", "done", or None if it was never begun."""
    try:
        return str(json.loads((place / "job.json").read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError):
        return None


# -- reading -----------------------------------------------------------------------------------------------------------


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


def _parameters(method: type[Adapter]) -> set[str]:
    return set(inspect.signature(method.__init__).parameters)
