"""The records of a job as columns, and their scores."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from petal.evaluate import Scores

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Records:
    """The records of one job as columns, one entry per batch, in stream order."""

    position: NDArray[np.int64]
    domain: NDArray[np.str_]
    severity: NDArray[np.int64]
    n: Floats
    error: Floats
    nll: Floats
    brier: Floats
    confidence: Floats
    entropy: Floats
    calibration: Floats = field(repr=False)   # [batches, 3, bins]
    views_used: Floats
    restored: Floats
    skipped: Floats
    seconds: Floats
    forwards: Floats                          # of samples through networks, in batches
    backwards: Floats
    distance: Floats
    visit: Floats                             # number of the visit of all domains, from 0
    alarms: Floats                            # of the guard, up to this batch
    learned: Floats                           # 1, or 0 if there was no time to learn from it

    def __len__(self) -> int:
        return len(self.position)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The domains in order of their first appearance."""
        return tuple(dict.fromkeys(self.domain.tolist()))

    @cached_property
    def pairs(self) -> frozenset[tuple[str, int]]:
        """Every (domain, severity) of the stream."""
        return frozenset(zip(self.domain.tolist(), self.severity.tolist(), strict=True))

    @cached_property
    def visits(self) -> list[tuple[str, int, int]]:
        """Every segment of one domain: its name, its first batch and the batch after its last."""
        starts = [0, *(np.flatnonzero(self.domain[1:] != self.domain[:-1]) + 1).tolist(), len(self)]
        return [(str(self.domain[a]), a, b) for a, b in pairwise(starts) if b > a]

    @cached_property
    def skipped_updates(self) -> int:
        """Number of skipped updates. The column counts from the last reset of the method."""
        before = np.concatenate([[0.0], self.skipped[:-1]])
        return int(np.where(self.skipped >= before, self.skipped - before, self.skipped).sum())

    def counts(self, where: Mask | None = None) -> Floats:
        """Calibration counts [3, bins] summed over the batches `where`."""
        chosen = self.calibration if where is None else self.calibration[where]
        return np.asarray(chosen.sum(0))

    def scores(self, domain: str | None = None, visit: int | None = None) -> Scores:
        """Scores over all samples of a domain, of a visit, of both, or of the stream."""
        where = np.ones(len(self), bool) if domain is None else self.domain == domain
        if visit is not None:
            where = where & (self.visit == visit)
        n, error, nll, brier = (column[where].tolist() for column in (self.n, self.error, self.nll, self.brier))
        return Scores.pooled(n, error, nll, brier, torch.from_numpy(self.counts(where)))
