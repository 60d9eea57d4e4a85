"""The figures by method and domain: error against cost, the heat map, the reliability diagrams and the sample images."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from petal.report.drawing import WIDTH, Drawing, brief, legible, line_style, marker, new_figure
from petal.report.files import JobFolder, SampleImages
from petal.report.metric import METRICS
from petal.report.palette import BLUE, GAP, HEAT, INK, RULE, SHARE, VERMILION
from petal.report.rows import ResultRow
from petal.report.scores import Section

_FEW = 0.002   # bins of the reliability diagram with a smaller share of the samples are mostly noise


def cost(section: Section) -> Drawing | None:
    """Error against the time of a batch; the line joins the rows that no other beats in both."""
    rows = [row for row in section.rows if row.jobs and row.seconds > 0 and math.isfinite(row.stat("error").mean)]
    if len(rows) < 2:
        return None
    how = METRICS["error"]
    points = [(1e3 * row.seconds, how.scale * row.stat("error").mean) for row in rows]
    front = sorted(p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points))
    figure = new_figure(4.2)
    axes = figure.subplots()
    axes.plot(*zip(*front, strict=True), color=INK, linewidth=1, drawstyle="steps-post", zorder=1)
    for row, point in zip(rows, points, strict=True):
        axes.plot(*point, marker=marker(section, row), color=line_style(section, row)["color"], markersize=6, zorder=4)
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(points)[0], 2.2 * max(points)[0])
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ms per batch (median, log scale)")
    axes.set_ylabel(how.title)
    axes.grid(True, axis="x")
    axes.margins(y=0.1)
    _label(axes, [(point, legible(row.label), point in front) for row, point in zip(rows, points, strict=True)])
    best = ", ".join(row.label for point in front for row, at in zip(rows, points, strict=True) if at == point)
    caption = f"Lower and further left is better. No other row is both faster and better than these: {best}."
    return Drawing("cost", "Error against cost", caption, figure)


def _label(axes: Axes, labels: list[tuple[tuple[float, float], str, bool]], space: float = 10.0) -> None:
    """Names beside their points, in bold where asked for; where they would overlap, moved, with a line to the point."""
    per_point = axes.figure.dpi / 72
    axes.set_axisbelow(True)
    places = [axes.transData.transform(point) / per_point for point, _, _ in labels]
    taken: list[tuple[float, float, float]] = [(x - 4, x + 4, y) for x, y in places]     # no label hides a point
    for point, text, bold in sorted(labels, key=lambda label: label[0][1]):
        x, y = axes.transData.transform(point) / per_point
        start, end = x + 7, x + 7 + 5.2 * len(text)
        near = [y + sign * space * n for n in range(len(labels) + 1) for sign in (1, -1)]
        place = next((p for p in near if not any(a < end and start < b and abs(p - at) < space for a, b, at in taken)), y)
        taken.append((start, end, place))
        line = {"arrowstyle": "-", "color": RULE, "linewidth": 0.6} if place != y else None
        axes.annotate(text, point, xytext=(7, place - y - 3), textcoords="offset points", fontsize=8.5,
                      fontweight="bold" if bold else "normal", arrowprops=line, zorder=1.5,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # fmt: skip


def heatmap(section: Section, metric: str = "error") -> Drawing | None:
    """Methods by domains, as colours and numbers."""
    rows, how = [row for row in section.rows if row.jobs], METRICS[metric]
    if not rows:
        return None
    names = [*section.domains, None]
    values = np.array([[row.stat(metric, name).mean * how.scale for name in names] for row in rows])
    figure = new_figure(1.2 + 0.36 * len(rows), max(WIDTH, 2.5 + 0.46 * len(names)))
    axes = figure.subplots()
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    image = axes.imshow(values, cmap=HEAT, aspect="auto", vmin=low, vmax=high if high > low else low + 1)
    for y, x in np.ndindex(values.shape):
        value = values[y, x]
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text = "–" if math.isnan(value) else f"{value:.1f}" if how.scale == 100 else f"{value:.2f}"
        best = np.isfinite(value) and value == np.nanmin(values[:, x]) < np.nanmax(values[:, x])
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black",
                  fontweight="bold" if best else "normal")  # fmt: skip
    headings = [brief(name) if name else "Mean" for name in names]
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
    """Accuracy against confidence, one panel per method."""
    rows = [(row, row.calibration) for row in section.rows if row.jobs]
    drawn = [(row, counts) for row, counts in rows if counts is not None]
    if not drawn:
        return None
    columns = min(4, len(drawn))
    lines = math.ceil(len(drawn) / columns)
    figure = new_figure(0.4 + 2.45 * lines, 2.25 * columns)
    panels = np.asarray(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False))
    for panel in panels.flat[len(drawn):]:
        panel.set_visible(False)
    for (row, counts), panel in zip(drawn, panels.flat, strict=False):
        count, confidence, correct = counts
        edges = np.linspace(0, 1, len(count) + 1)
        some = count > 0
        safe = np.where(some, count, 1)
        accuracy, mean = np.where(some, correct / safe, np.nan), np.where(some, confidence / safe, np.nan)
        width = 1 / len(count)
        panel.bar(edges[:-1], count / count.sum(), width=width, align="edge", color=SHARE, linewidth=0, zorder=1)
        many = count >= max(_FEW * count.sum(), 20)
        panel.bar(edges[:-1][many], (mean - accuracy)[many], bottom=accuracy[many], width=width, align="edge",
                  facecolor=GAP, edgecolor=VERMILION, hatch="////", linewidth=0.4, zorder=2, alpha=0.8)  # fmt: skip
        panel.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=3)
        full: dict[str, Any] = {"linewidth": 1.4}
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 0.8}
        for which, marks in ((many, full), (some & ~many, hollow)):
            if which.any():
                panel.plot(mean[which], accuracy[which], color=BLUE, marker="o", markersize=3.2, zorder=4,
                           clip_on=False, **marks)  # fmt: skip
        panel.set_title(f"{row.label}\nECE {METRICS['ece'].text(row.stat('ece').mean)}", fontsize=8.5)
        panel.set_xlim(0, 1)
        panel.set_ylim(0, 1)
        panel.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        panel.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
    for column in range(columns):   # the lowest panel of each column has the numbers
        panels[(len(drawn) - 1 - column) // columns, column].tick_params(labelbottom=True)
    figure.supxlabel("confidence", fontsize=9.5)
    figure.supylabel("accuracy", fontsize=9.5)
    figures = "; ".join(f"{row.label} {METRICS['ece'].text(row.stat('ece').mean)}" for row, _ in drawn)
    caption = ("Accuracy (line) against confidence; on the dashed diagonal a method is right as often as it claims. "
               f"Hatched: the gap. Hollow: bins with fewer than 20 samples or {_FEW:.1%}. Grey: share of the samples with "
               f"that confidence. ECE: {figures}.")
    return Drawing("reliability", "Reliability", caption, figure)


def samples(section: Section, each: int = 4) -> Drawing | None:
    """Images of each domain with the predictions; right and wrong differ in sign, word and dashes of the frame."""
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
                title = f"{brief(domain)}, severity {severity}" if severity and section.gradual else brief(domain)
                panel.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=4)
    names = " and ".join(row.label for row, _ in chosen)
    right = "; ".join(f"{row.label} is right on {sum(map(_right, s.entries))} of {len(s.entries)}" for row, s in chosen)
    caption = (f"Images of each domain; below each its true class, then the predictions of {names}, one per line: ✓ right, "
               "✗ wrong and the predicted class, with the probability. The frame (dashed if wrong) is the first one's. "
               f"Of the images kept, {right}; these are a few images, not a score.")
    return Drawing("samples", "Samples of each domain", caption, figure, photographic=True)


def _chosen_samples(section: Section) -> list[tuple[ResultRow, SampleImages]]:
    """PETAL or else the last row that kept images, and the source network if it kept the same ones."""
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
        spine.set(visible=True, color=BLUE if right else VERMILION, linewidth=1.2 if right else 2.2,
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
