"""A row of the tables: the runs of one method with one setting, and their averages."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from petal.report.files import JobFolder
from petal.report.metric import Stat, stat
from petal.report.records import Floats
from petal.report.summaries import Averages, Summary


@dataclass
class ResultRow:
    """One row of the tables: the finished jobs of one method with one setting, and those that are not finished."""

    id: str
    method: str
    label: str
    fidelity: str
    options: Mapping[str, Any]
    posterior: str
    jobs: list[JobFolder] = field(default_factory=list)
    unfinished: list[JobFolder] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    paper: str | None = None
    averages: Averages | None = None          # of runs that were not kept one by one; no others are in such a row

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What jobs must have in common to be averaged."""
        options = json.dumps(self.options, sort_keys=True, default=str)
        return self.id, self.method, self.label, self.fidelity, self.posterior, options, str(self.averages is not None)

    @cached_property
    def runs(self) -> list[Summary]:
        """The summary of every finished run; of runs that were not kept one by one, that of their means."""
        if self.averages is not None:
            return [self.averages.means]
        return [job.summary for job in self.jobs if job.summary is not None]

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.jobs) if self.averages is None else self.averages.runs

    def stat(self, metric: str, domain: str | None = None) -> Stat:
        """A score over the runs: of the whole stream, or of one domain (over all its visits)."""
        found = [run.mean if domain is None else run.by_domain.get(domain) for run in self.runs]
        over = stat(getattr(one, metric) for one in found if one is not None and one.n)
        if self.averages is None or not over.n:
            return over
        return Stat(over.mean, self.averages.std.get(metric) if domain is None else None, self.averages.runs)

    def by_visit(self, metric: str) -> list[Stat]:
        """A score over the runs for each visit of all domains."""
        visits = [run.by_visit or (run.mean,) for run in self.runs]
        count = max(map(len, visits), default=0)
        return [stat(getattr(v[n], metric) for v in visits if n < len(v) and v[n].n) for n in range(count)]

    @property
    def ordered(self) -> bool:
        """True if its answers use the order of the images."""
        order = self.options.get("order")
        return isinstance(order, Mapping) and not order.get("shuffled")

    @property
    def alarms(self) -> int | None:
        """Alarms of the guard over all runs; None if there is no guard."""
        return sum(run.alarms for run in self.runs) if "guard" in self.options else None

    @property
    def seeds(self) -> list[str]:
        """The seeds of the finished jobs."""
        return list(dict.fromkeys(job.seed for job in self.jobs))

    @property
    def orders(self) -> list[str]:
        """The orders of the finished jobs."""
        return list(dict.fromkeys(job.order for job in self.jobs))

    @property
    def over(self) -> str:
        """What the runs are averaged over, for example "5 seeds"."""
        seeds, orders = len(self.seeds), len(self.orders)
        if not self.jobs:
            return "unfinished" if self.unfinished else "none"
        if len(self.jobs) == 1:
            return "1 run"
        if orders == 1:
            return f"{len(self.jobs)} seeds"
        return f"{len(self.jobs)} orders" if seeds == 1 else f"{len(self.jobs)} runs ({orders} orders, {seeds} seeds)"

    @property
    def images(self) -> int:
        """Images per run."""
        return max((run.mean.n for run in self.runs), default=0)

    @property
    def batches(self) -> int:
        """Batches per run."""
        return sum(run.batches for run in self.runs) // max(len(self.runs), 1)

    @property
    def views_share(self) -> float:
        """Share of batches whose prediction used augmented views."""
        return _mean(run.views for run in self.runs)

    @property
    def restored_share(self) -> float:
        """Mean share of the weights restored per batch."""
        return _mean(run.restored for run in self.runs)

    @property
    def learned_share(self) -> float:
        """Share of batches that there was time to learn from."""
        return _mean(run.learned for run in self.runs)

    @property
    def seconds(self) -> float:
        """Median seconds per batch that was learned from; of several runs the mean of theirs."""
        return _mean(run.seconds for run in self.runs if math.isfinite(run.seconds))

    @property
    def forwards(self) -> float:
        """Mean number of forward passes per batch; NaN for runs of before they were counted."""
        return _mean(run.forwards for run in self.runs)

    @property
    def backwards(self) -> float:
        """Mean number of backward passes per batch."""
        return _mean(run.backwards for run in self.runs)

    @property
    def skipped(self) -> int:
        """Updates skipped, over all runs."""
        return sum(run.skipped for run in self.runs)

    @property
    def calibration(self) -> Floats | None:
        """Calibration counts [3, bins] over all runs; None if they were not kept."""
        counts = [run.calibration for run in self.runs if run.calibration is not None]
        return np.sum(counts, axis=0) if counts and len(counts) == len(self.runs) else None


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else math.nan
