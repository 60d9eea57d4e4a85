"""Measurements as a page: eager and fast side by side, the parts of a step, and figures against K and batch size.

If a file was not measured with the present code, add a key `version` with a name for the code that it was measured with. Its
steps are marked with that name in the tables, and no line of a figure joins them with other steps.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from petal._files import replacing
from petal.errors import DataError
from petal.report.drawing import STYLE, Drawing
from petal.report.palette import GREY, VERMILION

MARK = "<!-- From here on by `petal bench page`. -->"
COLOURS = {"eager": GREY, "auto": VERMILION}
NAMES = {"eager": "eager", "auto": "fast"}


@dataclass(frozen=True)
class Measured:
    """The rows of one file of `petal bench steps --json`, each with the file's version, and the command that made them."""

    command: str
    torch: str
    rows: list[dict[str, Any]]

    @property
    def device(self) -> str:
        """The device that was measured."""
        return str(self.rows[0]["device"])


def read(path: str | Path) -> Measured:
    """A file of `petal bench steps --json`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = [{**row, "version": str(content.get("version", ""))} for row in content["rows"]]
        measured = Measured(content["command"], content["torch"], rows)
        kind = content["bench"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of `petal bench steps --json`: {error!r}") from error
    if kind != "steps" or not measured.rows:
        raise DataError(f"{path} holds {len(measured.rows)} rows of {kind!r}; a page is made of steps")
    return measured


def write_page(files: Sequence[str | Path], out: str | Path) -> list[Path]:
    """Write the page, with its figures in a folder `images` beside it. Returns what was written.

    What `out` holds above the mark stays: the text about the figures is written there by hand.
    """
    out = Path(out)
    measured = [read(path) for path in files]
    head = f"# Performance\n\n{MARK}\n"
    if out.exists():
        before, mark, _ = out.read_text(encoding="utf-8").partition(MARK)
        if not mark:
            raise DataError(f"{out} exists and has no line {MARK!r}: add it below the text that is to stay")
        head = before + MARK + "\n"
    written = []
    body = []
    for device, group in _by(measured, lambda m: m.device).items():
        rows = sorted((row for m in group for row in m.rows), key=_place)
        body += [f"\n## {device}, torch {', '.join(sorted({m.torch for m in group}))}\n"]
        body += ["```\n" + "\n".join(dict.fromkeys(m.command for m in group)) + "\n```\n"]
        body += [step_table(rows), part_table(rows)]
        for drawing in drawings(rows):
            path = out.parent / "images" / f"{drawing.name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(drawing.render("png"))
            written.append(path)
            body += [f"![{drawing.caption}](images/{path.name})\n"]
    with replacing(out) as temporary:
        temporary.write_text(head + "\n".join(part for part in body if part), encoding="utf-8")
    return [out, *written]


def step_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: one line per step, eager and fast side by side."""
    lines = [
        "| step | eager ms | fast ms | speed-up | fast range | fast images/s | of matrix rate | eager MiB | fast MiB |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for key, pair in _by(rows, _step).items():
        by_engine = {row["engine"]: row for row in pair}
        eager, fast = by_engine.get("eager"), by_engine.get("auto")
        ratio = f"{eager['ms'] / fast['ms']:.1f}" if eager and fast else ""
        cells = [_name(key), _number(eager, "ms"), _number(fast, "ms"), ratio]
        cells += [f"{fast['fastest']:.1f} to {fast['slowest']:.1f}" if fast else "", _number(fast, "images_per_second", 0)]
        cells += [f"{fast['matrix_share']:.0%}" if fast else "", _number(eager, "peak_mib", 0), _number(fast, "peak_mib", 0)]
        lines.append("| " + " | ".join(cells) + " |")
    first = next(iter(rows))
    note = (f"Milliseconds per batch, medians of {first['batches']} batches after warm-up. *of matrix rate*: share of the "
            "rate of a large matrix product in the same run.")
    return "\n".join([*lines, "", note, ""])


def part_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: the parts of those steps whose parts were measured."""
    rows = [row for row in rows if row["parts"]]
    names = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    if not rows:
        return ""
    lines = ["| parts, ms | " + " | ".join(names) + " |", "| --- " + "| ---: " * len(names) + "|"]
    for row in rows:
        cells = [f"{row['parts'][name]:.2f}" if name in row["parts"] else "" for name in names]
        lines.append(f"| {_name(_step(row))}, {NAMES[row['engine']]} | " + " | ".join(cells) + " |")
        if row["engine"] == "auto":
            limit = limits(row)
            cells = [f"{limit[name]:.2f}" if name in limit else "" for name in names]
            lines.append("| its matrix products at the matrix rate | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def limits(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per part that the networks' products alone would take at the measured matrix rate."""
    opened = row["gate"] == "open"
    forwards = {"source": 1 if row["views"] else 0, "teacher": 1, "student": 3}
    if opened:
        forwards |= {"teacher": 0, "teacher on views": row["views"]}
    one = row["ms"] * row["matrix_share"] / sum(forwards.values())
    return {name: count * one for name, count in forwards.items() if count and name in row["parts"]}


def drawings(rows: list[dict[str, Any]]) -> list[Drawing]:
    """Time against K and against batch size, for the method and network that were measured at most points."""
    out = []
    views = _longest([r for r in rows if r["gate"] == "open" or r["views"] == 0], ("method", "network", "batch"), "views")
    if views:
        title = f"{views[0]['method']}, {views[0]['network']}, batch {views[0]['batch']}: time against the number of views"
        out.append(_draw("performance-views", title, views, "views", "views K"))
    batches = _longest([r for r in rows if r["gate"] == "open"], ("method", "network", "views"), "batch")
    if batches:
        title = f"{batches[0]['method']}, {batches[0]['network']}, K {batches[0]['views']}: time against the batch size"
        out.append(_draw("performance-batch", title, batches, "batch", "images per batch"))
    return out


def _longest(rows: list[dict[str, Any]], fixed: tuple[str, ...], along: str) -> list[dict[str, Any]]:
    groups = _by(rows, lambda row: tuple(row[name] for name in fixed)).values()
    best = max(groups, key=lambda group: len({row[along] for row in group}), default=[])
    return best if len({row[along] for row in best}) > 2 else []


def _draw(name: str, title: str, rows: list[dict[str, Any]], along: str, label: str) -> Drawing:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for (engine, version), group in _by(rows, lambda row: (row["engine"], row.get("version", ""))).items():
            line = sorted(group, key=lambda row: row[along])
            xs, ys = [row[along] for row in line], [row["ms"] for row in line]
            axes.plot(xs, ys, "o:" if version else "o-", color=COLOURS.get(engine), label=_series(line[0]), markersize=4,
                      markerfacecolor="white" if version else None)  # fmt: skip
            for x, y in zip(xs, ys, strict=True):
                axes.annotate(f"{y:.0f}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=7.5)
        if along == "batch":
            axes.set_xscale("log")
            ticks = sorted({row[along] for row in rows})
            axes.set_xticks(ticks, [str(x) for x in ticks])
            axes.minorticks_off()
        else:
            axes.set_xticks(sorted({row[along] for row in rows}))
        axes.set(xlabel=label, ylabel="ms per batch", title=title, ylim=(0, None))
        axes.margins(y=0.15)
        axes.legend(frameon=False)
    values = "; ".join(f"{_series(row)}, {label} {row[along]}: {row['ms']:.1f} ms" for row in rows)
    return Drawing(name, title, f"{title}. {values}.", figure)


def _series(row: dict[str, Any]) -> str:
    name: str = NAMES.get(row["engine"], row["engine"])
    return f"{name} ({row['version']})" if row.get("version") else name


def _step(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["method"], row["network"], row["batch"], row["views"], row["gate"], row.get("version", ""))


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["network"], row["gate"] == "none", row["method"], -row["batch"], -row["views"], row["gate"] != "open")


def _name(step: tuple[Any, ...]) -> str:
    method, network, batch, views, gate, version = step
    views = f", K {views} {gate}" if gate != "none" else ""
    return f"{method}, {network}, batch {batch}{views}" + (f" ({version})" if version else "")


def _number(row: dict[str, Any] | None, key: str, digits: int = 1) -> str:
    return f"{row[key]:,.{digits}f}" if row is not None and row[key] else ""


def _by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
