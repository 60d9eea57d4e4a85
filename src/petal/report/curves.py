"""The figures along the stream and by visit: one line per method, the mean over its seeds."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from petal.report.drawing import Drawing, brief, legend, legible, line_style, marker, new_figure, sparse_markers
from petal.report.metric import METRICS
from petal.report.palette import INK, RULE
from petal.report.records import Floats, Records
from petal.report.rows import ResultRow
from petal.report.scores import Section


def _along(section: Section) -> list[tuple[ResultRow, str, list[Records]]]:
    """The rows that were run in the shown order, with label and records; of unfinished rows the longest job."""
    found = []
    for row in section.rows:
        jobs = [job for job in row.jobs if job.order == section.order]
        label = row.label
        if not row.jobs:
            partial = [job for job in row.unfinished if job.order == section.order and job.batches > 1]
            jobs, label = sorted(partial, key=lambda job: -job.batches)[:1], f"{row.label} (unfinished)"
        records = [job.records for job in jobs if job.records is not None]
        if records:
            longest = max(len(r) for r in records)
            found.append((row, label, [r for r in records if len(r) == longest]))
    return found


def _smooth(records: Records, values: Floats) -> Floats:
    """A centred running mean weighted by batch size, inside each visit of a domain unless visits are many and short."""
    visits = records.visits
    if len(visits) > 40:
        return _running(values, records.n, max(1, len(records) // 150))
    parts = 9 if len(set(records.severity.tolist())) > 1 else 4
    pieces = [_running(values[a:b], records.n[a:b], max(1, min((b - a) // parts, 25))) for _, a, b in visits]
    return np.concatenate(pieces)


def _running(values: Floats, weights: Floats, width: int) -> Floats:
    known = np.isfinite(values)
    total = np.cumsum(np.concatenate([[0.0], np.where(known, values * weights, 0.0)]))
    weight = np.cumsum(np.concatenate([[0.0], np.where(known, weights, 0.0)]))
    low = np.clip(np.arange(len(values)) - width // 2, 0, len(values) - width)   # at the ends the window keeps its width
    high = low + width
    span = weight[high] - weight[low]
    return np.where(span > 0, (total[high] - total[low]) / np.where(span > 0, span, 1.0), np.nan)


def _curve(
    axes: Axes, section: Section, row: ResultRow, label: str, runs: list[Records], column: str, scale: float = 1.0, *,
    smooth: bool = True, band: bool = False,
) -> Line2D:  # fmt: skip
    """Draw the mean over seeds of a column of the records, and the range over seeds if `band`."""
    columns = [getattr(r, column) for r in runs]
    curves = np.stack([_smooth(r, c) if smooth else c for r, c in zip(runs, columns, strict=True)]) * scale
    known = np.isfinite(curves).all(0)
    curves, x, style = curves[:, known], (runs[0].position + 1)[known], line_style(section, row)
    if band and len(runs) > 1:
        axes.fill_between(x, curves.min(0), curves.max(0), color=style["color"], alpha=0.18, linewidth=0)
    style |= {"marker": marker(section, row)} if len(x) < 2 else sparse_markers(section, row, len(x))
    return axes.plot(x, curves.mean(0), label=legible(label), **style)[0]


def _domains(axes: Axes, section: Section, names: bool = True) -> None:
    """Boundaries of the domains, with their names above."""
    along = _along(section)
    if not along:
        return
    records = max((runs[0] for _, _, runs in along), key=len)
    visits = records.visits
    axes.set_xlim(float(records.position[0]) + 0.5, float(records.position[-1]) + 1.5)
    if len(visits) > 40:
        first = visits[0][0]
        starts = [a for name, a, _ in visits if name == first]
        for number, a in enumerate(starts, 1):
            axes.axvline(records.position[a] + 0.5, color=RULE, linewidth=0.6, zorder=0)
            if names and (len(starts) <= 30 or number % 10 == 1):
                axes.annotate(f"{number}", (records.position[a] + 0.5, 1.0), (2, 2), xycoords=("data", "axes fraction"),
                              textcoords="offset points", fontsize=8, annotation_clip=False)  # fmt: skip
        return
    for name, a, b in visits:
        left, right = records.position[a] + 0.5, records.position[b - 1] + 1.5
        if a:
            axes.axvline(left, color=RULE, linewidth=0.6, zorder=0)
        if names:
            straight = len(visits) <= 6
            axes.annotate(brief(name), ((left + right) / 2, 1.0), (0, 3), xycoords=("data", "axes fraction"),
                          textcoords="offset points", rotation=0 if straight else 50, ha="center" if straight else "left",
                          va="bottom", fontsize=8.5, annotation_clip=False, rotation_mode="anchor")  # fmt: skip


def _order_note(section: Section) -> str:
    several = any(len(runs) > 1 for _, _, runs in _along(section))
    return (f", order {section.order}" if len(section.orders) > 1 else "") + (", mean over seeds" if several else "")


def _smooth_note(section: Section) -> str:
    return f"{_order_note(section)}; smoothed by a running mean within each domain"


def stream(section: Section, metric: str = "error") -> Drawing | None:
    """A score along the stream, one line per method, with the boundaries and names of the domains."""
    along, how = _along(section), METRICS[metric]
    if not along:
        return None
    figure = new_figure(4.6 if not section.gradual else 5.2)
    if section.gradual:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(6, 1))
    else:
        axes, below = figure.subplots(), None
    handles = [_curve(axes, section, row, label, runs, metric, how.scale, band=True) for row, label, runs in along]
    axes.set_ylabel(how.title)
    axes.set_ylim(bottom=0)
    if below is not None:
        records = max((runs[0] for _, _, runs in along), key=len)
        below.step(records.position + 1, records.severity, where="mid", color=INK, linewidth=1)
        below.set_ylabel("severity")
        below.set_yticks([1, 3, 5])
        _domains(below, section, names=False)
    (below if below is not None else axes).set_xlabel("batch")
    _domains(axes, section)
    legend(figure, handles)
    ends = "; ".join(f"{label} {how.text(_mean(runs, metric))}" for _, label, runs in along)
    band = " The bands are the range over seeds." if any(len(runs) > 1 for _, _, runs in along) else ""
    caption = f"{how.title} along the stream{_smooth_note(section)}.{band} Means over the stream: {ends}."
    return Drawing("stream", f"{how.title} along the stream", caption, figure)


def visits(section: Section, metric: str = "error") -> Drawing | None:
    """A score by visit of a recurring stream, one line per method."""
    how = METRICS[metric]
    along = [(row, [run for run in row.runs if run.by_visit]) for row in section.rows]
    along = [(row, runs) for row, runs in along if runs]
    if section.visits < 2 or not along:
        return None
    figure = new_figure(4.2)
    axes = figure.subplots()
    handles, ends = [], []
    for row, runs in along:
        label, count = row.label, min(len(run.by_visit) for run in runs)
        table = np.array([[getattr(run.by_visit[v], metric) for v in range(count)] for run in runs]) * how.scale
        style, x = line_style(section, row), np.arange(1, count + 1)
        if len(runs) > 1:
            axes.fill_between(x, table.min(0), table.max(0), color=style["color"], alpha=0.18, linewidth=0)
        style |= {"marker": marker(section, row), "markersize": 4}
        handles.append(axes.plot(x, table.mean(0), label=legible(label), **style)[0])
        first, last = (how.text(float(table[:, v].mean()) / how.scale) for v in (0, -1))
        ends.append(f"{label} {first} to {last}")
    axes.set_ylabel(how.title)
    axes.set_xlabel("visit")
    axes.set_xlim(0.5, section.visits + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, handles)
    caption = f"{how.title} of each visit of all domains{_order_note(section)}. First and last visit: {'; '.join(ends)}."
    return Drawing("visits", f"{how.title} by visit", caption, figure)


def _mean(runs: list[Records], metric: str) -> float:
    return float(np.mean([getattr(r.scores(), metric) for r in runs]))


def weights(section: Section) -> Drawing | None:
    """Distance from the source weights and share of the weights restored, along the stream."""
    along = _along(section)
    moved = [entry for entry in along if any(np.isfinite(r.distance).any() for r in entry[2])]
    restored = [entry for entry in along if any((r.restored > 0).any() for r in entry[2])]
    panels = [(entries, column, scale, title) for entries, column, scale, title in (
        (moved, "distance", 1.0, "distance from source"), (restored, "restored", 100.0, "weights restored (%)")) if entries]
    if not panels:
        return None
    figure = new_figure(0.9 + 2.1 * len(panels))
    drawn = np.asarray(figure.subplots(len(panels), 1, sharex=True, squeeze=False)).ravel()
    handles: dict[str, Line2D] = {}
    for number, (axes, (entries, column, scale, title)) in enumerate(zip(drawn, panels, strict=True)):
        for row, label, runs in entries:
            handles[label] = _curve(axes, section, row, label, runs, column, scale, smooth=False)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        _domains(axes, section, names=number == 0)
    drawn[-1].set_xlabel("batch")
    legend(figure, list(handles.values()))
    titles = {"distance": "root mean square distance of the weights from the source",
              "restored": "share of the weights restored"}  # fmt: skip
    what = " and ".join(titles[column] for _, column, _, _ in panels)
    last = "; ".join(f"{label} {_last(runs):.3g}" for _, label, runs in moved)
    caption = f"{what[0].upper()}{what[1:]}, per batch{_order_note(section)}."
    caption += f" Distance at the end: {last}." if last else ""
    return Drawing("weights", "Distance from the source and share restored", caption, figure)


def _last(runs: list[Records]) -> float:
    ends = [r.distance[np.isfinite(r.distance)] for r in runs]
    return float(np.mean([end[-1] for end in ends if len(end)] or [math.nan]))


def confidence(section: Section) -> Drawing | None:
    """Mean confidence, and the share of batches that used views, along the stream."""
    along = _along(section)
    if not along:
        return None
    viewing = [entry for entry in along if any((r.views_used > 0).any() for r in entry[2])]
    figure = new_figure(3.4 if not viewing else 5.0)
    drawn = np.asarray(figure.subplots(2 if viewing else 1, 1, sharex=True, squeeze=False)).ravel()
    handles = [_curve(drawn[0], section, row, label, runs, "confidence", 1.0) for row, label, runs in along]
    drawn[0].set_ylabel("mean confidence")
    if viewing:
        for row, label, runs in viewing:
            _curve(drawn[1], section, row, label, runs, "views_used", 100.0)
        drawn[1].set_ylabel("batches with views (%)")
        drawn[1].set_ylim(-3, 103)
    for number, axes in enumerate(drawn):
        _domains(axes, section, names=number == 0)
    drawn[-1].set_xlabel("batch")
    legend(figure, handles)
    shares = "; ".join(f"{label} {np.mean([r.views_used.mean() for r in runs]):.0%}" for _, label, runs in viewing)
    caption = f"Mean confidence of the predictions along the stream{_smooth_note(section)}."
    caption += f" Batches whose answer averages augmented views: {shares}." if shares else " No method used augmented views."
    return Drawing("confidence", "Confidence and use of views along the stream", caption, figure)
