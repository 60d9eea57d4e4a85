"""The figures, drawn from the records. Colour-blind safe, told apart by line style too, on white, without global state."""

import io
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from petal._files import replacing
from petal.errors import ConfigError, DataError
from petal.report.files import Floats, JobFolder, Records, SampleImages
from petal.report.scores import METRICS, Report, ResultRow, Section
from petal.report.tables import short

FILE_TYPES = ("png", "svg", "pdf")

WIDTH = 9.0
_FEW = 0.002   # bins of the reliability diagram with a smaller share of the samples are mostly noise
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.hashsalt": "petal",
    "pdf.fonttype": 42,
}

# Okabe and Ito's colours without the yellow, which is not legible on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7A7A7A")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
_KNOWN: dict[str | None, tuple[str, Any, float]] = {
    "Source": ("#7A7A7A", _DASHES[2], 1.4),
    "BN Adapt": ("#56B4E9", _DASHES[1], 1.4),
    "Pseudo-label": ("#E69F00", _DASHES[3], 1.4),
    "TENT-online": ("#CC79A7", _DASHES[1], 1.4),
    "TENT-continual": ("#CC79A7", _DASHES[0], 1.4),
    "CoTTA": ("#009E73", _DASHES[0], 1.7),
    "PETAL (S-Res)": ("#0072B2", _DASHES[1], 1.9),
    "PETAL (FIM)": ("#D55E00", _DASHES[0], 2.2),
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its file name, title, and the caption that also serves those who cannot see it."""

    name: str
    title: str
    caption: str
    figure: Figure
    photographic: bool = False

    def render(self, kind: str = "png") -> bytes:
        """The figure as the bytes of a PNG (2x), SVG or PDF file."""
        if kind not in FILE_TYPES:
            raise ConfigError(f"figures are written as {', '.join(FILE_TYPES)}; not {kind!r}")
        stream = io.BytesIO()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")
            self.figure.savefig(stream, format=kind, dpi=200, metadata=metadata)
        return stream.getvalue()


def draw(section: Section) -> list[Drawing]:
    """Every figure that the records of a section can give."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")   # class names in scripts that the font lacks
        drawings = [drawing for make in FIGURES.values() if (drawing := make(section)) is not None]
        for drawing in drawings:   # laid out once, so that every file of a figure is the same
            drawing.figure.draw_without_rendering()
            drawing.figure.set_layout_engine("none")
    return drawings


def write_figures(
    report: Report, folder: str | Path, kinds: Iterable[str] = ("png",)
) -> dict[str, list[tuple[Drawing, Path]]]:
    """Write every figure; returns, for each section, the drawings with the path of their first file."""
    kinds, folder = tuple(kinds), Path(folder)
    wrong = [kind for kind in kinds if kind not in FILE_TYPES]
    if wrong or not kinds:
        raise ConfigError(f"figures are written as {', '.join(FILE_TYPES)}; not {', '.join(wrong) or 'nothing'}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from None
    written: dict[str, list[tuple[Drawing, Path]]] = {}
    for section in report.sections:
        for drawing in draw(section):
            paths = [folder / f"{section.slug}-{drawing.name}.{kind}" for kind in kinds]
            for path, kind in zip(paths, kinds, strict=True):
                with replacing(path) as temporary:
                    temporary.write_bytes(drawing.render(kind))
            written.setdefault(section.slug, []).append((drawing, paths[0]))
    return written


# What the figures share


def _figure(height: float, width: float = WIDTH) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _look(section: Section, row: ResultRow) -> dict[str, Any]:
    """Colour, dash and width of a row: the same in every figure."""
    twins = [other for other in section.rows if other.paper is not None and other.paper == row.paper]
    if row.paper in _KNOWN and twins[0] is row:
        colour, dash, width = _KNOWN[row.paper]
        return {"color": colour, "linestyle": dash, "linewidth": width}
    used = {_KNOWN[other.paper][0] for other in section.rows if other.paper in _KNOWN}
    free = [colour for colour in _COLOURS if colour not in used] or list(_COLOURS)
    others = [other for other in section.rows if other.paper not in _KNOWN or _first(section, other) is not other]
    place = next(n for n, other in enumerate(others) if other is row)
    return {"color": free[place % len(free)], "linestyle": _DASHES[(place + 3) % len(_DASHES)], "linewidth": 1.6}


def _first(section: Section, row: ResultRow) -> ResultRow:
    return next(other for other in section.rows if other.paper == row.paper)


def _along(section: Section) -> list[tuple[ResultRow, str, list[Records]]]:
    """The rows that have the shown order: label and records. A row with no finished job shows its longest unfinished one."""
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
    low = np.clip(np.arange(len(values)) - width // 2, 0, len(values) - width)   # at the ends the window stops, not shrinks
    high = low + width
    span = weight[high] - weight[low]
    return np.where(span > 0, (total[high] - total[low]) / np.where(span > 0, span, 1.0), np.nan)


def _curve(
    axes: Axes, section: Section, row: ResultRow, label: str, runs: list[Records], column: str, scale: float = 1.0, *,
    smooth: bool = True, band: bool = False,
) -> Line2D:  # fmt: skip
    """Draw the mean over seeds of a column of the records, and their range if `band`."""
    columns = [getattr(r, column) for r in runs]
    curves = np.stack([_smooth(r, c) if smooth else c for r, c in zip(runs, columns, strict=True)]) * scale
    known = np.isfinite(curves).all(0)
    curves, x, look = curves[:, known], (runs[0].position + 1)[known], _look(section, row)
    if band and len(runs) > 1:
        axes.fill_between(x, curves.min(0), curves.max(0), color=look["color"], alpha=0.18, linewidth=0)
    if len(x) < 2:
        look |= {"marker": "o"}
    return axes.plot(x, curves.mean(0), label=_legible(label), **look)[0]


def _legible(label: str) -> str:
    return f" {label}" if label.startswith("_") else label   # matplotlib leaves out labels that start with _


def _brief(domain: str) -> str:
    name = short(domain)
    return name if len(name) <= 20 else f"{name[:19]}…"


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
            axes.axvline(records.position[a] + 0.5, color="#999999", linewidth=0.6, zorder=0)
            if names and (len(starts) <= 30 or number % 10 == 1):
                axes.annotate(f"{number}", (records.position[a] + 0.5, 1.0), (2, 2), xycoords=("data", "axes fraction"),
                              textcoords="offset points", fontsize=8, annotation_clip=False)  # fmt: skip
        return
    for name, a, b in visits:
        left, right = records.position[a] + 0.5, records.position[b - 1] + 1.5
        if a:
            axes.axvline(left, color="#999999", linewidth=0.6, zorder=0)
        if names:
            straight = len(visits) <= 6
            axes.annotate(_brief(name), ((left + right) / 2, 1.0), (0, 3), xycoords=("data", "axes fraction"),
                          textcoords="offset points", rotation=0 if straight else 50, ha="center" if straight else "left",
                          va="bottom", fontsize=8.5, annotation_clip=False, rotation_mode="anchor")  # fmt: skip


def _legend(figure: Figure, handles: list[Line2D]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, max(1, len(handles))), frameon=False,
                  handlelength=3.2)  # fmt: skip


def _order_note(section: Section) -> str:
    several = any(len(runs) > 1 for _, _, runs in _along(section))
    return (f", order {section.order}" if len(section.orders) > 1 else "") + (", mean over seeds" if several else "")


def _smooth_note(section: Section) -> str:
    return f"{_order_note(section)}; smoothed by a running mean within each domain"


# The figures


def stream(section: Section, metric: str = "error") -> Drawing | None:
    """A score along the stream, one line a method, with the domains' boundaries and names."""
    along, how = _along(section), METRICS[metric]
    if not along:
        return None
    figure = _figure(4.6 if not section.gradual else 5.2)
    if section.gradual:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(6, 1))
    else:
        axes, below = figure.subplots(), None
    handles = [_curve(axes, section, row, label, runs, metric, how.scale, band=True) for row, label, runs in along]
    axes.set_ylabel(how.title)
    axes.set_ylim(bottom=0)
    if below is not None:
        records = max((runs[0] for _, _, runs in along), key=len)
        below.step(records.position + 1, records.severity, where="mid", color="#444444", linewidth=1)
        below.set_ylabel("severity")
        below.set_yticks([1, 3, 5])
        _domains(below, section, names=False)
    (below if below is not None else axes).set_xlabel("batch")
    _domains(axes, section)
    _legend(figure, handles)
    ends = "; ".join(f"{label} {how.text(_mean(runs, metric))}" for _, label, runs in along)
    band = " The bands are the range over seeds." if any(len(runs) > 1 for _, _, runs in along) else ""
    caption = f"{how.title} along the stream{_smooth_note(section)}.{band} Means over the stream: {ends}."
    return Drawing("stream", f"{how.title} along the stream", caption, figure)


def visits(section: Section, metric: str = "error") -> Drawing | None:
    """A score by visit of a recurring stream, one line a method."""
    along, how = _along(section), METRICS[metric]
    if section.visits < 2 or not along:
        return None
    figure = _figure(4.2)
    axes = figure.subplots()
    handles, ends = [], []
    for row, label, runs in along:
        count = int(max(r.visit.max() for r in runs)) + 1
        table = np.array([[getattr(r.scores(visit=v), metric) for v in range(count)] for r in runs]) * how.scale
        look, x = _look(section, row), np.arange(1, count + 1)
        if len(runs) > 1:
            axes.fill_between(x, table.min(0), table.max(0), color=look["color"], alpha=0.18, linewidth=0)
        handles.append(axes.plot(x, table.mean(0), label=_legible(label), marker="o", markersize=3, **look)[0])
        first, last = (how.text(float(table[:, v].mean()) / how.scale) for v in (0, -1))
        ends.append(f"{label} {first} to {last}")
    axes.set_ylabel(how.title)
    axes.set_xlabel("visit")
    axes.set_xlim(0.5, section.visits + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, handles)
    caption = f"{how.title} of each visit of all domains{_order_note(section)}. First and last visit: {'; '.join(ends)}."
    return Drawing("visits", f"{how.title} by visit", caption, figure)


def _mean(runs: list[Records], metric: str) -> float:
    return float(np.mean([getattr(r.scores(), metric) for r in runs]))


def heatmap(section: Section, metric: str = "error") -> Drawing | None:
    """Methods by domains, as colours with the numbers written in."""
    rows, how = [row for row in section.rows if row.jobs], METRICS[metric]
    if not rows:
        return None
    names = [*section.domains, None]
    values = np.array([[row.stat(metric, name).mean * how.scale for name in names] for row in rows])
    figure = _figure(1.2 + 0.36 * len(rows), max(WIDTH, 2.5 + 0.46 * len(names)))
    axes = figure.subplots()
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    image = axes.imshow(values, cmap="YlGnBu", aspect="auto", vmin=low, vmax=high if high > low else low + 1)
    for y, x in np.ndindex(values.shape):
        value = values[y, x]
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text = "–" if math.isnan(value) else f"{value:.1f}" if how.scale == 100 else f"{value:.2f}"
        best = np.isfinite(value) and value == np.nanmin(values[:, x]) < np.nanmax(values[:, x])
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black",
                  fontweight="bold" if best else "normal")  # fmt: skip
    headings = [_brief(name) if name else "Mean" for name in names]
    axes.set_xticks(range(len(names)), headings, rotation=50, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.axvline(len(names) - 1.5, color="white", linewidth=3)
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axes, label=how.title, pad=0.01, fraction=0.03).outline.set_visible(False)
    caption = f"{how.title} of each method in each domain; darker is worse, bold is the best of a column."
    return Drawing("heatmap", f"{how.title}: methods by domains", caption, figure)


def reliability(section: Section) -> Drawing | None:
    """Accuracy against confidence, one panel a method."""
    rows = [row for row in section.rows if row.jobs]
    if not rows:
        return None
    columns = min(4, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure = _figure(0.4 + 2.45 * lines, 2.25 * columns)
    panels = np.asarray(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False))
    for panel in panels.flat[len(rows):]:
        panel.set_visible(False)
    for row, panel in zip(rows, panels.flat, strict=False):
        count, confidence, correct = row.calibration
        edges = np.linspace(0, 1, len(count) + 1)
        some = count > 0
        safe = np.where(some, count, 1)
        accuracy, mean = np.where(some, correct / safe, np.nan), np.where(some, confidence / safe, np.nan)
        width = 1 / len(count)
        panel.bar(edges[:-1], count / count.sum(), width=width, align="edge", color="#cfcfcf", linewidth=0, zorder=1)
        many = count >= max(_FEW * count.sum(), 20)
        panel.bar(edges[:-1][many], (mean - accuracy)[many], bottom=accuracy[many], width=width, align="edge",
                  facecolor="#F3C9A5", edgecolor="#D55E00", hatch="////", linewidth=0.4, zorder=2, alpha=0.8)  # fmt: skip
        panel.plot([0, 1], [0, 1], color="#444444", linewidth=1, linestyle=(0, (4, 2)), zorder=3)
        full: dict[str, Any] = {"linewidth": 1.4}
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 0.8}
        for which, look in ((many, full), (some & ~many, hollow)):
            if which.any():
                panel.plot(mean[which], accuracy[which], color="#0072B2", marker="o", markersize=3.2, zorder=4,
                           clip_on=False, **look)  # fmt: skip
        panel.set_title(f"{row.label}\nECE {METRICS['ece'].text(row.stat('ece').mean)}", fontsize=8.5)
        panel.set_xlim(0, 1)
        panel.set_ylim(0, 1)
        panel.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        panel.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    for column in range(columns):   # the lowest panel of a column has the numbers
        panels[(len(rows) - 1 - column) // columns, column].tick_params(labelbottom=True)
    figure.supxlabel("confidence", fontsize=9.5)
    figure.supylabel("accuracy", fontsize=9.5)
    figures = "; ".join(f"{row.label} {METRICS['ece'].text(row.stat('ece').mean)}" for row in rows)
    caption = ("Accuracy (line) against confidence; on the dashed diagonal a method is as often right as it says. "
               f"Hatched: the gap. Hollow: bins with fewer than 20 samples or {_FEW:.1%}. Grey: share of the samples with "
               f"that confidence. ECE: {figures}.")
    return Drawing("reliability", "Reliability", caption, figure)


def weights(section: Section) -> Drawing | None:
    """Distance from the source weights, and the share of the weights put back, along the stream."""
    along = _along(section)
    moved = [entry for entry in along if any(np.isfinite(r.distance).any() for r in entry[2])]
    restored = [entry for entry in along if any((r.restored > 0).any() for r in entry[2])]
    panels = [(entries, column, scale, title) for entries, column, scale, title in (
        (moved, "distance", 1.0, "distance from source"), (restored, "restored", 100.0, "weights restored (%)")) if entries]
    if not panels:
        return None
    figure = _figure(0.9 + 2.1 * len(panels))
    drawn = np.asarray(figure.subplots(len(panels), 1, sharex=True, squeeze=False)).ravel()
    handles: dict[str, Line2D] = {}
    for number, (axes, (entries, column, scale, title)) in enumerate(zip(drawn, panels, strict=True)):
        for row, label, runs in entries:
            handles[label] = _curve(axes, section, row, label, runs, column, scale, smooth=False)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        _domains(axes, section, names=number == 0)
    drawn[-1].set_xlabel("batch")
    _legend(figure, list(handles.values()))
    titles = {"distance": "root mean square distance of the weights from the source",
              "restored": "share of the weights restored"}  # fmt: skip
    what = " and ".join(titles[column] for _, column, _, _ in panels)
    last = "; ".join(f"{label} {_last(runs):.3g}" for _, label, runs in moved)
    caption = f"{what[0].upper()}{what[1:]}, batch by batch{_order_note(section)}."
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
    figure = _figure(3.4 if not viewing else 5.0)
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
    _legend(figure, handles)
    shares = "; ".join(f"{label} {np.mean([r.views_used.mean() for r in runs]):.0%}" for _, label, runs in viewing)
    caption = f"Mean confidence of the predictions along the stream{_smooth_note(section)}."
    caption += f" Batches whose answer averages augmented views: {shares}." if shares else " No method used augmented views."
    return Drawing("confidence", "Confidence and use of views along the stream", caption, figure)


def samples(section: Section, each: int = 4) -> Drawing | None:
    """Images of each domain with what was predicted; right and wrong are told by a sign, a word and the frame's dashes."""
    chosen = _chosen_samples(section)
    if not chosen:
        return None
    pictures = chosen[0][1]
    domains = [d for d in section.domains if any(e["domain"] == d for e in pictures.entries)]
    where = {d: [n for n, e in enumerate(pictures.entries) if e["domain"] == d][:each] for d in domains}
    across = min(3, len(domains))
    down, most = math.ceil(len(domains) / across), max(len(numbers) for numbers in where.values())
    wide, tall = (0.78 * most + 0.18) * across, (1.16 + 0.135 * (len(chosen) + 1)) * down
    figure = Figure(figsize=(wide, tall))
    FigureCanvasAgg(figure)
    for place, domain in enumerate(domains):
        left, top = place % across / across, 1 - place // across / down
        for offset, number in enumerate(where[domain]):
            panel = figure.add_axes((left + (0.09 + 0.78 * offset) / wide, top - 0.98 / tall, 0.7 / wide, 0.7 / tall))
            _picture(panel, section, pictures, chosen, number)
            if not offset:
                severity = pictures.entries[number].get("severity")
                title = f"{_brief(domain)}, severity {severity}" if severity and section.gradual else _brief(domain)
                panel.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=4)
    names = " and ".join(row.label for row, _ in chosen)
    right = "; ".join(f"{row.label} is right on {sum(map(_right, s.entries))} of {len(s.entries)}" for row, s in chosen)
    caption = (f"Images of each domain; under each its true class, then what {names} said, one line each: ✓ right, "
               "✗ wrong and what was said instead, with the probability. The frame (dashed if wrong) is the first one's. "
               f"Of the images kept, {right}; these are a few images, not a score.")
    return Drawing("samples", "Samples of each domain", caption, figure, photographic=True)


def _chosen_samples(section: Section) -> list[tuple[ResultRow, SampleImages]]:
    """The last row that kept images (PETAL, where it was run), and the source network if it saw the same ones."""
    found = []
    for row in section.rows:
        jobs: list[JobFolder] = row.jobs
        kept = next((s for s in (job.samples() for job in jobs if job.order == section.order) if s is not None), None)
        if kept is not None:
            found.append((row, kept))
    if not found:
        return []
    last = next((e for e in found if e[0].paper == "PETAL (FIM)"), found[-1])
    sources = [e for e in found if e[0].method == "source" and e[0] is not last[0]]
    same = [e for e in sources if np.array_equal(e[1].images, last[1].images)]
    return [last, *same[:1]]


def _right(entry: dict[str, Any]) -> bool:
    return bool(entry.get("label") == entry.get("predicted"))


def _picture(
    panel: Axes, section: Section, pictures: SampleImages, chosen: list[tuple[ResultRow, SampleImages]], number: int
) -> None:
    image = pictures.images[number]
    panel.set_axis_on()
    panel.grid(False)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.imshow(image, interpolation="nearest" if image.shape[0] < 64 else "antialiased")
    right = _right(pictures.entries[number])
    for spine in panel.spines.values():
        spine.set(visible=True, color="#0072B2" if right else "#D55E00", linewidth=1.2 if right else 2.2,
                  linestyle="-" if right else (0, (3, 1.5)))  # fmt: skip
    lines = [_class(section, pictures.entries[number].get("label"))]
    for _, said in chosen:
        entry = said.entries[number]
        probability = entry.get("probability")
        sure = f"{100 * probability:.0f}%" if isinstance(probability, (int, float)) else ""
        lines.append(f"✓ {sure}" if _right(entry) else f"✗ {_class(section, entry.get('predicted'), 8)} {sure}")
    panel.set_xlabel("\n".join(lines), fontsize=7, labelpad=2.5, linespacing=1.2)


def _class(section: Section, label: object, length: int = 12) -> str:
    classes = section.classes
    if classes is not None and isinstance(label, int) and 0 <= label < len(classes):
        name = classes[label]
        return name if len(name) <= length else f"{name[: length - 1]}…"
    return str(label)


FIGURES: dict[str, Callable[[Section], Drawing | None]] = {
    "visits": visits,
    "stream": stream,
    "heatmap": heatmap,
    "reliability": reliability,
    "weights": weights,
    "confidence": confidence,
    "samples": samples,
}
