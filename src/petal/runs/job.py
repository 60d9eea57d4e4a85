"""One row over one order with one seed, in a folder of its own.

A job that was interrupted, at whatever moment, continues from its last checkpoint: lines after it are cut off and made
again, by the same state and the same stream, so they are the same.
"""

import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from petal._files import alone, left_behind, make_folder, write_json
from petal.checkpoint import Checkpoints
from petal.data import Batch
from petal.errors import DataError
from petal.evaluate import evaluate_batch
from petal.guard import Guard
from petal.methods import METHODS, Adapter
from petal.methods.mean_teacher import MeanTeacher
from petal.parallel import ParallelError, Ranks
from petal.recipes.rows import WRAPPERS, Row
from petal.recipes.settings import as_json, options_of
from petal.runs.experiment import OpenExperiment
from petal.runs.records import (
    Lines,
    complete_lines,
    distance_from_start,
    goes_on,
    guard_record,
    job_status,
    read_records,
    score,
)
from petal.runs.samples import SampleWriter

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
class JobProgress:
    """Where a job stands, after every batch: means are over all images so far."""

    job: Job
    position: int
    batches: int
    record: dict[str, Any] | None
    error: float
    resumed: bool = False


def jobs_for(rows: Iterable[Row], orders: Sequence[int], seeds: Sequence[int]) -> list[Job]:
    """All jobs of a run. Rows that draw no random numbers give the same for every seed, and run once, with seed 0.

    Always the same one: a seed that is added later would bring the same runs again, and averages would count them twice.
    """
    return [Job(row, number, seed) for row in rows for number in orders for seed in (seeds if row.random else [0])]


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


def run_job(
    job: Job,
    folder: str | Path,
    opened: OpenExperiment,
    *,
    checkpoint_every: int | None = None,
    progress: Callable[[JobProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[dict[str, Any]]:
    """Run a job in its folder RUN/jobs/ID, or finish it, or just read it if it is done. Returns its records.

    `stop` is asked after every batch: when it says yes, a checkpoint is written and the job is left for a later call.

    `checkpoint_every` is a number of batches; without one, checkpoints are written about every 20 seconds, and less often
    where writing them takes long. Of several ranks the first does all this; the others take the same steps, write nothing
    and return no records.
    """
    ranks, tell, stop = opened.ranks, progress or (lambda p: None), stop or (lambda: False)
    if ranks is not None and not ranks.first:
        _follow(job, opened, ranks, tell, stop)
        return []
    place = Path(folder) / "jobs" / job.id
    make_folder(place)
    with alone(place, f"another process is running the job in {place}"):
        if job_status(place) == "done":
            Checkpoints(place).clear()      # in case it was killed between its last two lines
            records = read_records(place)
            if ranks is not None:
                ranks.exchange([DONE])
            tell(JobProgress(job, len(records), len(records), None, score(records)["error"], resumed=True))
            return records
        for stale in left_behind(place):
            stale.unlink()
        return _Running(job, place, opened, checkpoint_every, tell, stop).run()


def _follow(
    job: Job, opened: OpenExperiment, ranks: Ranks, tell: Callable[[JobProgress], None], stop: Callable[[], bool]
) -> None:
    """The job as every rank but the first sees it. Methods without views are computed by all of them."""
    adapter, stream = opened.adapter(job.row, job.seed), opened.stream(job.order)
    position = ranks.start(adapter)
    if position == DONE:
        position = len(stream)
    for batch in stream.at(position) if position < len(stream) else ():
        if job.row.reset_on_domain_change and batch.domain_changed:
            adapter.reset()
        adapter(batch.x.to(adapter.device))
        position += 1
        if stop():
            break
    tell(JobProgress(job, position, len(stream), None, 0.0))


class _Running:
    """A job while it runs."""

    def __init__(
        self, job: Job, place: Path, opened: OpenExperiment, every: int | None, tell: Callable[[JobProgress], None],
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.job, self.place, self.opened, self.every, self.tell, self.stop = job, place, opened, every, tell, stop
        gc.collect()                        # the last job's adapter, whose parts hold each other, and what it has on a GPU
        if opened.device.type == "cuda" and opened.compiled_for != job.row.method:
            torch.compiler.reset()          # torch compiles no more beyond a number of programs: let go the others
        opened.compiled_for = job.row.method
        self.adapter = opened.adapter(job.row, job.seed)
        self.distance = distance_from_start(self.adapter)
        self.stream = opened.stream(job.order)
        self.checkpoints = Checkpoints(place)
        self.samples = SampleWriter(place, self.stream)
        self.seconds = 0.0
        self.wait, self.last = SECONDS, time.monotonic()
        self.about = {**describe_job(job), "batches": len(self.stream), "fingerprint": self.stream.fingerprint()}

    def run(self) -> list[dict[str, Any]]:
        path = self.place / "records.jsonl"
        records = self.resume(path)
        wrong, seen = sum(r["error"] * r["n"] for r in records), sum(r["n"] for r in records)
        start = len(records)
        write_json(self.place / "job.json", {**self.about, "status": "running", "seconds": self.seconds})
        self.tell(JobProgress(self.job, start, self.stream.batches or 0, None, wrong / max(seen, 1), start > 0))
        ranks = self.opened.ranks
        if ranks is not None:
            ranks.start(self.adapter, start)
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
                self.tell(JobProgress(self.job, len(records), self.stream.batches or 0, record, wrong / seen))
                last = len(records) == self.stream.batches
                stopping = self.stop() and not last
                if stopping or self.due(len(records), start):
                    self.checkpoint(len(records), lines)
                if stopping:
                    return records
                if ranks is not None and ranks.stopping:
                    raise self.lost(ParallelError("the launcher ended this run"), lines, len(records))
            lines.sync()
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
        self.opened.check_pixels(batch.x)
        scored, logits = evaluate_batch(self.adapter, batch, batch.position)
        record = scored.to_json()
        self.samples.take(batch, logits)
        if self.distance is not None:
            record["distance"] = self.distance()
        if self.opened.experiment.visits is not None:
            record["visit"] = batch.visit
        if isinstance(self.adapter, Guard):
            record["guard"] = guard_record(self.adapter)
        return {**record, "row": self.job.row.name, "order": self.job.order, "seed": self.job.seed}

    def lost(self, error: ParallelError, lines: Lines, position: int) -> ParallelError:
        """The error to end with when another rank is gone, after a checkpoint of the last whole batch.

        With several steps per batch, or something around the method, the state may be that of half a batch: then the last
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

    def checkpoint(self, position: int, lines: Lines) -> None:
        """What lies before the position must be on the disk when the checkpoint says so."""
        began = time.monotonic()
        if goes_on(lines.sync, self.samples.write):
            extra = {"position": position, "seconds": self.seconds, "fingerprint": self.stream.fingerprint()}
            self.checkpoints.save(self.adapter, extra)
        self.last = time.monotonic()
        self.wait = max(SECONDS, 20 * max(self.last - began, self.checkpoints.seconds))
