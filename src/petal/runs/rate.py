"""Equal time: a stream as fast as the source network answers it, and methods that miss what they have no time for.

Batch k comes at k·P, where P is the source network's time for a batch over the rate. A method takes it if it is done with
what it learned from before batch k + 1 comes; learning takes it the time that was measured, or that is given. What it misses
it answers with the weights that it has, by one pass and without views, which takes no time: a copy of the network does it.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petal.errors import ConfigError
from petal.evaluate import evaluate_batch
from petal.recipes.rows import Row
from petal.runs.experiment import OpenExperiment

TIMED = 9               # batches of the source network that are timed, after three that are not


class Clock:
    """When a method is free again, in seconds since the first batch.

    >>> clock = Clock(period=1.0, cost=2.5)
    >>> learned = []
    >>> for position in range(8):
    ...     learned.append(clock.in_time(position))
    ...     if learned[-1]:
    ...         clock.learn(position, seconds=0.0)
    >>> learned
    [True, False, True, False, False, True, False, True]
    """

    def __init__(self, period: float, cost: float | None = None, free: float = 0.0) -> None:
        self.period, self.cost, self.free = period, cost, free
        self.fresh = True       # programs are made and memory is found with the first batch of a process

    def in_time(self, position: int) -> bool:
        """True if the method is free before the next batch comes; at the same moment is too late, whatever rounding does."""
        return self.free < (position + 1 - 1e-6) * self.period

    def learn(self, position: int, seconds: float) -> None:
        """The method learns from a batch, and that took it so long. The first one of a process counts as one period."""
        cost = self.cost if self.cost is not None else self.period if self.fresh else seconds
        self.free, self.fresh = max(self.free, position * self.period) + cost, False


def given_times(text: str | None) -> dict[str, float]:
    """Milliseconds per batch by row, from text.

    >>> given_times("source=10, petal+guard=32.5")
    {'source': 10.0, 'petal+guard': 32.5}
    """
    times: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        try:
            times[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not 0 < times[name.strip()] < float("inf"):
            raise ConfigError(f"rate_ms takes milliseconds of rows, such as source=10,tent=26.5; got {part.strip()!r}")
    return times


def pace(opened: OpenExperiment, order: int) -> dict[str, Any]:
    """What a manifest says of the rate: the times given, and the source network's, measured unless it is given."""
    e = opened.experiment
    if e.rate is None:
        return {}
    if opened.ranks is not None:
        raise ConfigError("a rate is for one process: several that share out the views would each keep their own time")
    times = given_times(e.rate_ms)
    e.rows(list(times))                         # an unknown one is an error
    return {"rate": e.rate, "rate_ms": times, "rate_source_ms": times.get("source") or _measured(opened, order)}


def _measured(opened: OpenExperiment, order: int) -> float:
    adapter = opened.adapter(Row("source", "Source", "source"))
    batch = next(iter(opened.stream(order)))
    seconds = [evaluate_batch(adapter, batch)[0].seconds for _ in range(3 + TIMED)][3:]
    return 1000 * statistics.median(seconds)


def clock_for(manifest: Mapping[str, Any], row: str, free: float = 0.0) -> Clock | None:
    """The clock of a row, from its run's manifest; None if the stream waits for the method."""
    if manifest.get("rate") is None:
        return None
    cost = manifest["rate_ms"].get(row)
    period = manifest["rate_source_ms"] / manifest["rate"] / 1000
    return Clock(period, None if cost is None else cost / 1000, free)


def times_of(folder: Path, opened: OpenExperiment, order: int) -> Mapping[str, Any]:
    """The times of a run: those in its manifest, or if there is none yet, those of now."""
    if opened.experiment.rate is None:
        return {}
    path = folder / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else pace(opened, order)
    return found
