"""A job of `petal run` in a process that is killed, at a named point or from outside.

Processes are forked from a server that has imported everything, so that each takes a fraction of a second. The points are
reached by patching what the job calls, in the process that is to die: the code under test knows nothing of them.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer would import, in every process
from torch import Tensor

import petal._files
from petal import Adapter, DiagonalGaussian, corrupt, models
from petal.checkpoint import Checkpoints, digest
from petal.data import from_arrays
from petal.engine import passes
from petal.methods.descent import Descent, PutBack
from petal.recipes import WRAPPERS, Row, apply_settings, pick_rows, recipe, rows
from petal.runs import Experiment, Job, JobProgress, OpenExperiment, read_records, run_job
from petal.runs.records import Lines

torch.set_num_threads(1)
corrupt(torch.rand(1, 3, 32, 32), "frost", severity=5, profile="cifar")  # its textures are drawn once in a process

BATCH = 8


@dataclass
class Kept(OpenExperiment):
    """Remembers its adapter and the logits of the last batch."""

    def adapter(self, row: Row, seed: int = 0) -> Adapter:
        self.last = super().adapter(row, seed)
        self.last.register_forward_hook(self.keep)
        return self.last

    def keep(self, adapter: Adapter, inputs: object, logits: Tensor) -> None:
        self.logits = logits


def work(
    folder: Path, batches: int = 1, engine: str = "eager", point: str | None = None, times: int = 1, row: str = "petal"
) -> None:
    """Run, or finish, a job of 15 domains of `batches` each; at `point`, reached that many times, the process dies.

    Predictions are added to predictions.log as they are made; at the end a hash of the whole state is in state.json.
    """
    if point is not None:
        POINTS[point](Fuse(times))
    g = torch.Generator().manual_seed(5)
    x, y = torch.rand(BATCH * batches, 3, 32, 32, generator=g), torch.randint(0, 10, (BATCH * batches,), generator=g)
    model = models.build("small", 10, seed=0, width=8)
    chosen = replace(recipe("digits"), views=2, confidence=2.0)
    q = DiagonalGaussian.isotropic(model, 0.1)
    opened = Kept(Experiment("digits", batch_size=BATCH, engine=engine), model, q, from_arrays(x, y))
    folder.mkdir(parents=True, exist_ok=True)

    def progress(p: JobProgress) -> None:
        if p.record is not None:
            with (folder / "predictions.log").open("a") as file:
                file.write(json.dumps([p.position - 1, digest({"logits": opened.logits})]) + "\n")

    settings = ["small.memory=8", "small.every=8", "guard.every=2", "guard.window=16"]
    (wanted,) = pick_rows(apply_settings(rows(chosen), settings, WRAPPERS), [row])
    run_job(Job(wanted), folder, opened, checkpoint_every=1, progress=progress)
    if hasattr(opened, "last"):
        (folder / "state.json").write_text(digest(opened.last.state_dict()))


def outcome(folder: Path, row: str = "petal") -> tuple[list[dict[str, Any]], dict[int, set[str]], str]:
    """Records without times, the different predictions made at each position, and the hash of the final state."""
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in read_records(folder / "jobs" / f"{row}-o1-s0")]
    made: dict[int, set[str]] = {}
    for line in (folder / "predictions.log").read_text().splitlines():
        position, prediction = json.loads(line)
        made.setdefault(position, set()).add(prediction)
    return records, made, (folder / "state.json").read_text()


class Processes:
    """Starts `work` in processes of its own."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["killed"])
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # the server looks nowhere else

    def start(self, *arguments: Any) -> multiprocessing.Process:
        process = self.context.Process(target=work, args=arguments)
        process.start()
        return process

    def run(self, *arguments: Any) -> int:
        """Its exit code; minus the signal's number if one ended it."""
        process = self.start(*arguments)
        process.join()
        return process.exitcode

    def kill_at_random(self, folder: Path, kills: int, batches: int, seed: int) -> tuple[int, int]:
        """Kill jobs at random times, and start them again, until so many were killed. Returns kills, jobs finished.

        Folders are numbered; the last job is finished.
        """
        draw = random.Random(seed)
        began = time.monotonic()
        assert self.run(folder / "0", batches) == 0
        whole, done, killed = time.monotonic() - began, 1, 0
        while True:
            process = self.start(folder / str(done), batches)
            if killed < kills:
                process.join(draw.uniform(0, whole))
                process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            if process.exitcode == 0:
                done += 1
                if killed == kills:
                    return killed, done
            else:
                killed += 1


# -- points ------------------------------------------------------------------------------------------------------------


class Fuse:
    """Ends the process, as `kill -9` does, when it is called for the last of so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True) -> Callable[[Fuse], None]:
    """Die before owner.name is called, if `when` says so of the call."""

    def plant(fuse: Fuse) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                fuse()
            return original(*args, **kwargs)

        setattr(owner, name, patched)

    return plant


def after(owner: Any, name: str) -> Callable[[Fuse], None]:
    """Die when owner.name returns."""

    def plant(fuse: Fuse) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            fuse()
            return out

        setattr(owner, name, patched)

    return plant


def half_a_file(fuse: Fuse) -> None:
    original = petal._files.save_file

    def patched(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        original(tensors, path, metadata)
        os.truncate(path, os.path.getsize(path) // 2)
        fuse()
        original(tensors, path, metadata)

    petal._files.save_file = patched


def half_a_line(fuse: Fuse) -> None:
    original = Lines.flush

    def patched(self: Lines) -> None:
        half = len(self.waiting) // 2
        self.file.write(self.waiting[:half])
        del self.waiting[:half]
        fuse()
        original(self)

    Lines.flush = patched


def folder_sync(fuse: Fuse) -> None:
    """Between the rename of a checkpoint and the sync of its folder."""
    replaced = threading.local()
    move, sync = os.replace, os.fsync

    def noting(old: Any, new: Any) -> None:
        move(old, new)
        replaced.checkpoint = is_checkpoint(old, new)

    def dying(descriptor: int) -> None:
        if getattr(replaced, "checkpoint", False):
            fuse()
        replaced.checkpoint = False
        sync(descriptor)

    os.replace, os.fsync = noting, dying


def is_checkpoint(old: Any, new: Any) -> bool:
    return Path(new).name.startswith("checkpoint-")


def by_the_writer(*args: Any, **kwargs: Any) -> bool:
    return threading.current_thread().name == "petal-checkpoints"


def named(name: str) -> Callable[..., bool]:
    return lambda old, new: Path(new).name == name


POINTS = {
    "after backward": after(Descent, "gradient"),
    "before the optimizer": before(torch.optim.Adam, "step"),
    "between EMA and restore": before(PutBack, "apply_"),
    "after backward, engine": before(passes, "total_gradient_"),
    "between EMA and restore, engine": before(torch, "where", lambda *a, **k: "out" in k),
    "after the step": before(Lines, "add"),
    "mid-record": half_a_line,
    "before the checkpoint": before(Checkpoints, "save"),
    "mid-write": half_a_file,
    "before the file's fsync": before(os, "fsync", by_the_writer),
    "before rename": before(os, "replace", is_checkpoint),
    "before the folder's fsync": folder_sync,
    "before the oldest goes": before(Path, "unlink", lambda path, *a, **k: path.name.startswith("checkpoint-")),
    "before the samples' rename": before(os, "replace", named("samples.json")),
    "before it is done": before(os, "replace", named("job.json")),
}
