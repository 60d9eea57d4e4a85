"""What the paper's whole evaluation costs: batches of every table, times milliseconds per batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from petal.bench.steps import NETWORK_INPUT
from petal.data import STREAMS, from_arrays
from petal.errors import ConfigError
from petal.models import build, flops
from petal.recipes import TABLE_1, Recipe, recipe, rows
from petal.runs import jobs_for

# recipe, images of each domain, seeds of the methods that draw random numbers
EVALUATION = (
    ("cifar10", 10_000, 5),
    ("cifar10-gradual", 10_000, 1),
    ("cifar100", 10_000, 5),
    ("imagenet", 5_000, 1),
    ("imagenet-3dcc", 5_000, 1),
)


@dataclass(frozen=True)
class Figures:
    """Milliseconds per batch of a network at its recipe's batch size, from `petal bench steps`."""

    forward: float              # source, batch norm
    student: float              # TENT and pseudo-labels: forward and backward
    closed: float               # a step of CoTTA or PETAL without views
    opened: float               # the same with views

    def of(self, method: str) -> tuple[float, float]:
        """The least and the most for a method: no batch with views, every batch with views."""
        if method in ("cotta", "petal"):
            return self.closed, self.opened
        ms = self.forward if method in ("source", "bn") else self.student
        return ms, ms


@dataclass(frozen=True)
class Cost:
    """One benchmark: all its runs."""

    recipe: str
    runs: int
    batches: int                # per run
    measured: bool              # False: by arithmetic from WRN-28-10
    least: float                # GPU-hours, no batch with views
    most: float                 # GPU-hours, every batch with views


def evaluation_cost(figures: Mapping[str, Figures]) -> list[Cost]:
    """GPU-hours of each benchmark, from the figures of networks.

    A network that has none is taken to need time in proportion to its arithmetic, from WRN-28-10: a rough guess, since small
    networks and large images leave a GPU's arithmetic idle.
    """
    if "wrn-28-10" not in figures:
        raise ConfigError("give the figures of wrn-28-10: the others may be guessed from it")
    out = []
    for name, images, seeds in EVALUATION:
        chosen = recipe(name)
        known = rows(chosen)
        jobs = jobs_for([known[row] for row in TABLE_1], chosen.numbers, range(seeds))
        count, measured = batches(chosen, images), chosen.network in figures
        factor = 1.0 if measured else _work(chosen) / _work(recipe("cifar10"))
        times = [figures[chosen.network if measured else "wrn-28-10"].of(job.row.method) for job in jobs]
        least, most = (sum(t) * count * factor / 3.6e6 for t in zip(*times, strict=True))
        out.append(Cost(name, len(jobs), count, measured, least, most))
    return out


def batches(chosen: Recipe, images: int) -> int:
    """Batches per run. A gradual stream visits its domains at several severities."""
    visits = len(chosen.order(1))
    if chosen.stream != "continual":
        one = from_arrays(torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
        visits = len(STREAMS[chosen.stream](one, chosen.order(1), batch_size=1))
    return visits * math.ceil(images / chosen.batch_size)


def _work(chosen: Recipe) -> float:
    size = NETWORK_INPUT.get(chosen.network, (32, chosen.classes))[0]
    return float(flops(build(chosen.network, chosen.classes, seed=0), (3, size, size)) * chosen.batch_size)
