"""Rows compared: differences over pairs of runs, with their intervals, and ranks over streams."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from petal.report.metric import METRICS, Metric
from petal.report.rows import ResultRow
from petal.report.scores import Report, Section
from petal.report.summaries import Summary
from petal.report.tables import NOTHING, Cell, Line, Table, informed, marked, summary


@dataclass(frozen=True)
class Difference:
    """A mean difference over `n` pairs of runs, and the ends of its 95 % interval (None for one pair).

    Without pairs it is the difference of averages whose single runs were not kept.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


def difference(row: ResultRow, other: ResultRow, metric: str) -> Difference:
    """A score of one row minus that of another, over the runs that both have.

    Runs are paired by order and seed. A row that was run with one seed is paired with every seed of the other: it draws no
    random numbers, or there is nothing better to compare with.
    """
    if row.averages is not None or other.averages is not None:      # the pairs are lost, their means are not
        return Difference(row.stat(metric).mean - other.stat(metric).mean, None, None, 0)
    pairs = [(getattr(a.mean, metric), getattr(b.mean, metric)) for a, b in _pairs(row, other)]
    values = np.array([a - b for a, b in pairs], dtype=np.float64)
    if not len(values):
        return Difference(math.nan, None, None, 0)
    mean = float(values.mean())
    if len(values) == 1:
        return Difference(mean, None, None, 1)
    from scipy.stats import t  # here, since it takes half a second to import

    half = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return Difference(mean, mean - half, mean + half, len(values))


def _pairs(row: ResultRow, other: ResultRow) -> Iterator[tuple[Summary, Summary]]:
    for order in (order for order in row.orders if order in other.orders):
        mine, theirs = ({job.seed: job.summary for job in r.jobs if job.order == order} for r in (row, other))
        for seed in dict.fromkeys((*mine, *theirs)):
            a, b = (found.get(seed, next(iter(found.values())) if len(found) == 1 else None) for found in (mine, theirs))
            if a is not None and b is not None:
                yield a, b


def pair_table(section: Section) -> Table | None:
    """Each row minus the one it is compared with (`Section.against`, by default the best), over pairs of runs."""
    rows, reference = [row for row in section.rows if row.jobs], section.reference()
    if reference is None or len(rows) < 2:
        return None
    lines = []
    for row in (row for row in rows if row is not reference):
        found = [difference(row, reference, name) for name in METRICS]
        cells = [_cell(how, d) for how, d in zip(METRICS.values(), found, strict=True)]
        lines.append(Line(marked(row), (*cells, Cell(str(found[0].n or NOTHING)))))
    return Table(
        name=f"{section.slug}-pairs",
        title=f"Compared with {marked(reference)}, {section.title}",
        corner="Method",
        columns=(*(how.title for how in METRICS.values()), "pairs"),
        lines=tuple(lines),
        notes=(f"Row minus {reference.label}, over pairs of runs of the same order and seed; in brackets the 95 % interval "
               "of the mean (Student's t). A row with one seed is paired with every seed.",
               *(["Where single runs were not kept, the difference of the averages, without pairs."]
                 if any(row.averages for row in rows) else []), *informed(rows)),
    )  # fmt: skip


def verdict(section: Section) -> str:
    """What won, by how much, and at what cost, in a few sentences."""
    best, rows = section.best(), [row for row in section.rows if row.jobs]
    text = summary(section)
    if best is None or len(rows) < 2:
        return text
    second = min((row for row in rows if row is not best), key=lambda row: row.stat("error").mean)
    found = difference(best, second, "error")
    how = METRICS["error"]
    if math.isfinite(found.mean):
        ends = "" if found.low is None or found.high is None else f" [{_text(how, found.low)}, {_text(how, found.high)}]"
        over = f" over {found.n} {'pair' if found.n == 1 else 'pairs'} of runs" if found.n else ""
        text += f" Difference to {marked(second)}: {_text(how, found.mean)} points{ends}{over}."
    source = next((row for row in rows if row.method == "source" and row is not best), None)
    times = [(row, 1000 * row.seconds) for row in (best, second, source) if row is not None and math.isfinite(row.seconds)]
    told = dict.fromkeys(f"{row.label} {ms:.1f}" for row, ms in times)
    return f"{text} Milliseconds per batch: {', '.join(told)}." if told else text


def _cell(how: Metric, found: Difference) -> Cell:
    if not math.isfinite(found.mean):
        return Cell(NOTHING)
    ends = "" if found.low is None or found.high is None else f"[{_text(how, found.low)}, {_text(how, found.high)}]"
    return Cell(_text(how, found.mean), ends)


def _text(how: Metric, value: float) -> str:
    return how.text(value, sign=True).replace("-", "−")


def rank_table(report: Report) -> Table | None:
    """The rank by error of every row in each stream, and their mean, for the rows that all streams have."""
    streams = [{row.id: row for row in section.rows if row.jobs} for section in report.sections]
    shared = [name for name in streams[0] if all(name in stream for stream in streams)] if streams else []
    if len(streams) < 2 or len(shared) < 2:
        return None
    errors = np.array([[stream[name].stat("error").mean for stream in streams] for name in shared])
    ranks = _ranks(errors)
    order = np.argsort(ranks.mean(1), kind="stable")
    lines = []
    for n in order:
        cells = [Cell(f"{rank:g}", f"({100 * error:.2f})") for rank, error in zip(ranks[n], errors[n], strict=True)]
        lines.append(Line(marked(streams[0][shared[n]]), (*cells, Cell(f"{ranks[n].mean():.2f}"))))
    return Table(
        name="ranks",
        title="Ranks by error over the streams",
        corner="Method",
        columns=(*(section.title for section in report.sections), "mean rank"),
        lines=tuple(lines),
        notes=("1 is the lowest error, given in brackets in per cent; equal errors share the mean of their ranks. Rows that "
               "every stream has.", *informed([streams[0][name] for name in shared])),
    )  # fmt: skip


def _ranks(errors: np.ndarray) -> np.ndarray:
    """Ranks from 1 down each column; equal values share their mean."""
    less = (errors[None] < errors[:, None]).sum(1)
    equal = (errors[None] == errors[:, None]).sum(1)
    return np.asarray(less + (equal + 1) / 2)
