"""Images without labels through an adapter into a .csv, which appears whole.

    OUT.csv             image, label, name, confidence, entropy, batch, did: a line for each image
    OUT.json            format "petal-apply-1": with which settings, the counts, what could not be read, SHA-256 of the .csv
    OUT.progress/       while it runs: the lines so far, and checkpoints

`did` is what the method did with the batch of the image: "adapted"; "unchanged", if it learned nothing from it; "skipped",
an update that was not finite; "alarm: ACTION" of the guard; "frozen", while learning is off; "unreadable: WHY" of the image.
"""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from petal._files import alone, left_behind, make_folder, write_json, writing
from petal._version import __version__
from petal.apply.settings import Opened
from petal.checkpoint import Checkpoints
from petal.data.pictures import Picture, as_batch
from petal.data.streams.prefetch import ahead
from petal.errors import ConfigError, DataError, StorageError
from petal.functional import entropy
from petal.guard import Guard
from petal.methods import Adapter
from petal.recipes.provenance import file_hash
from petal.runs.records import Lines, distance_from_start, goes_on

FORMAT = "petal-apply-1"
COLUMNS = ("image", "label", "name", "confidence", "entropy", "batch", "did")
SECONDS = 20.0                                  # between checkpoints, unless the user counts batches


@dataclass(frozen=True)
class ApplyProgress:
    """Where it stands, after every batch."""

    batch: int
    batches: int
    did: str
    confidence: float
    resumed: bool = False


@dataclass(frozen=True)
class Applied:
    """What came of it: images by what was done, those that could not be read with the reason, and whether all are done."""

    out: Path
    images: int
    did: dict[str, int]
    unreadable: dict[str, str]
    left_out: tuple[str, ...]
    done: bool
    was_done: bool = False


def apply(
    opened: Opened,
    out: str | Path,
    *,
    checkpoint_every: int | None = None,
    progress: Callable[[ApplyProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Applied:
    """Adapt over the images and write the predictions; if that was begun before, go on, to the lines of no break.

    `stop` is asked after every batch; when it says yes there is a checkpoint, and a later call goes on. What is done is not
    done again. Files of other settings, or that petal did not write, are refused.
    """
    out = Path(out)
    if out.suffix.lower() != ".csv":
        raise ConfigError(f"predictions are written as .csv: name the file so, not {out}")
    place = out.with_suffix(".progress")
    make_folder(place)
    with alone(place, f"another process is writing {out}"):
        work = _Work(opened, out, place, checkpoint_every, progress or (lambda p: None), stop or (lambda: False))
        done = True                             # nothing to keep, unless there are lines
        try:
            summary = work.run()
            done = summary.done
        finally:
            if done and not work.lines.exists():
                _remove(place)
    return summary


def _remove(place: Path) -> None:
    """The folder of work that is over, unless somebody else has put something there."""
    with suppress(OSError):
        for path in (place / "state.json", place / ".lock"):
            path.unlink(missing_ok=True)
        place.rmdir()


class _Work:
    """One call of `apply`."""

    def __init__(
        self, opened: Opened, out: Path, place: Path, every: int | None, tell: Callable[[ApplyProgress], None],
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.opened, self.out, self.place, self.every, self.tell, self.stop = opened, out, place, every, tell, stop
        self.lines, self.summary, self.state = place / "lines.csv", out.with_suffix(".json"), place / "state.json"
        self.about = json.loads(json.dumps(opened.about()))
        self.pictures, self.size = opened.pictures, opened.settings.batch_size
        self.batches = -(-self.pictures.count // self.size)
        self.wait, self.last = SECONDS, time.monotonic()

    def run(self) -> Applied:
        for stale in left_behind(self.place):           # of a process that was killed while it wrote
            stale.unlink(missing_ok=True)
        if self.is_done():
            return self.read(self.out, done=True, was_done=True)
        if self.state.is_file():
            self.compare(self.state, "unfinished work")
        elif self.lines.exists():
            self.lines.unlink()                 # killed before it said what it was
        adapter = self.opened.adapter()
        write_json(self.state, {"format": FORMAT, **self.about})
        checkpoints = Checkpoints(self.place)
        start = self.resume(adapter, checkpoints)
        self.tell(ApplyProgress(start, self.batches, "", 0.0, resumed=start > 0))
        doing = Doing(adapter)
        with Lines(self.lines) as lines, checkpoints:
            position = start
            for batch in ahead(self.pictures.batches(self.size, start), 2):
                self.take(adapter, doing, batch, position, lines)
                position += 1
                stopping = self.stop()
                if stopping or self.due(position, start):
                    self.checkpoint(adapter, checkpoints, lines, position)
                if stopping:
                    return self.read(self.lines, done=False)
            if position == 0:
                raise DataError("there was no image")
            lines.sync()
        checkpoints.clear()
        return self.finish()

    def take(self, adapter: Adapter, doing: "Doing", batch: list[Picture], position: int, lines: Lines) -> None:
        """Predict a batch, adapt to it, and add its lines."""
        x, logits, did = as_batch(batch), None, "unreadable"
        if len(x):
            self.opened.opened.check_pixels(x)
            logits = adapter(x.to(adapter.device)).detach().double().cpu()
            did = doing.now()
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows(self.rows(batch, logits, position, did))
        lines.add(text.getvalue().removesuffix("\n"))
        confidence = 0.0 if logits is None else float(logits.softmax(1).max(1).values.mean())
        self.tell(ApplyProgress(position + 1, self.batches, did, confidence))

    def rows(self, batch: list[Picture], logits: Tensor | None, position: int, did: str) -> list[list[Any]]:
        """A line for each image, in order."""
        out, number = list[list[Any]](), 0
        names = self.opened.names
        if logits is not None:
            probability, label = logits.softmax(1).max(1)
            spread = entropy(logits)
        for picture in batch:
            if picture.pixels is None:
                why = " ".join(picture.problem.split())
                out.append([picture.name, "", "", "", "", position, f"unreadable: {why}"])
                continue
            of = int(label[number])
            name = "" if names is None else names[of]
            numbers = f"{float(probability[number]):.6f}", f"{float(spread[number]):.6f}"
            out.append([picture.name, of, name, *numbers, position, did])
            number += 1
        return out

    # On disk

    def is_done(self) -> bool:
        """True if the file is there, made with these settings; an error if it is something else."""
        if not self.out.exists():
            return False
        if self.summary.is_file():
            found = self.compare(self.summary, "predictions")
            if found.get("sha256") == file_hash(self.out):
                return True
            if self.state.is_file():            # killed between the two
                return False
        raise ConfigError(f"{self.out} is there, and is not what petal wrote: give another --out, or remove it")

    def compare(self, path: Path, what: str) -> dict[str, Any]:
        """The JSON in a file, if it is of the same settings."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = found["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(f"{path} was not written by `petal apply`: give another --out, or remove it")
        changed = {key: value for key, value in self.about.items() if found.get(key) != value}
        wrong = [f"{key} was {_short(found.get(key))} and is {_short(value)}" for key, value in changed.items()]
        if wrong:
            raise ConfigError(
                f"{path} is of {what} with other settings: {'; '.join(wrong)}. Give another --out, the same settings, or "
                f"remove {path.parent if path == self.state else path}"
            )
        return dict(found)

    def resume(self, adapter: Adapter, checkpoints: Checkpoints) -> int:
        """Put the adapter where its last checkpoint was, and cut the lines off there. Returns the next batch."""
        size = self.lines.stat().st_size if self.lines.exists() else 0
        extra = checkpoints.load_latest(adapter, lambda e: e["bytes"] <= size)
        if extra is None:
            checkpoints.clear()
        with writing(self.lines):
            if extra is None:
                self.lines.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
            else:
                with self.lines.open("rb+") as file:
                    file.truncate(int(extra["bytes"]))
        return 0 if extra is None else int(extra["position"])

    def due(self, position: int, start: int) -> bool:
        if self.every is not None:
            return (position - start) % self.every == 0
        return time.monotonic() - self.last > self.wait

    def checkpoint(self, adapter: Adapter, checkpoints: Checkpoints, lines: Lines, position: int) -> None:
        """The lines before the position are on the disk when the checkpoint says so."""
        began = time.monotonic()
        if goes_on(lines.sync):
            checkpoints.save(adapter, {"position": position, "bytes": self.lines.stat().st_size})
        self.last = time.monotonic()
        self.wait = max(SECONDS, 20 * max(self.last - began, checkpoints.seconds))

    def finish(self) -> Applied:
        """First what is said of the file, then the file: it is never there without."""
        found = self.read(self.lines, done=True)
        write_json(self.summary, {
            "format": FORMAT, "petal": __version__, **self.about, "images": found.images, "did": found.did,
            "unreadable": found.unreadable, "left_out": list(found.left_out), "sha256": file_hash(self.lines),
        })  # fmt: skip
        try:
            self.lines.replace(self.out)
        except OSError as error:
            raise StorageError(f"cannot write {self.out}: {error.strerror}") from error
        return found

    def read(self, path: Path, done: bool, was_done: bool = False) -> Applied:
        """The counts, from the lines themselves."""
        did, unreadable = Counter[str](), dict[str, str]()
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                kind, _, why = line["did"].partition(": ")
                if kind == "unreadable":
                    unreadable[line["image"]] = why
                did[kind if kind == "unreadable" else line["did"]] += 1
        return Applied(self.out, did.total(), dict(did), unreadable, self.pictures.left_out, done, was_done)


class Doing:
    """What an adapter does with each batch, seen from outside: its counters, its guard, and whether its weights moved."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.distance = adapter, distance_from_start(adapter)
        self.skipped, self.where, self.rests = adapter.skipped, self._where(), self._frozen()

    def _frozen(self) -> bool:
        return isinstance(self.adapter, Guard) and self.adapter.frozen

    def _where(self) -> float | None:
        return None if self.distance is None else self.distance()

    def now(self) -> str:
        """After a call."""
        skipped, where = self.adapter.skipped, self._where()
        did = "skipped" if skipped > self.skipped else "unchanged" if where == self.where else "adapted"
        if self.rests:                              # before the call: that is what it went by
            did = "frozen"
        self.skipped, self.where, self.rests = skipped, where, self._frozen()
        if isinstance(self.adapter, Guard) and self.adapter.alarms:
            last = self.adapter.alarms[-1]
            did = f"alarm: {last.action}" if last.step == self.adapter.batches else did
        return did


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
