"""The paper's tables as values, the same for every output format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from petal.corruptions import CORRUPTIONS
from petal.report.metric import METRICS, Metric, Stat
from petal.report.paper import Published, Value, lookup, published
from petal.report.rows import ResultRow
from petal.report.scores import Report, Section, flatten
from petal.runs import ORDER

SHORT = dict(
    zip(
        CORRUPTIONS,
        ("Gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog", "brightness",
         "contrast", "elastic", "pixelate", "jpeg"),
        strict=True,
    )
)  # fmt: skip

NOTHING = "–"
ORDERED = "†"
INFORMED = f"{ORDERED} also uses the order of the images. Where labels come in runs it knows more than rows that do not."


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, what follows in plain type, and whether it is the best of its column."""

    text: str
    after: str = ""
    best: bool = False

    @property
    def plain(self) -> str:
        """The whole text without any mark-up."""
        return f"{self.text} {self.after}".strip()


@dataclass(frozen=True)
class Line:
    """A row of a table; `rule` puts a line above it."""

    label: str
    cells: tuple[Cell, ...]
    rule: bool = False


@dataclass(frozen=True)
class Table:
    """A table. `columns` are the headings after the first (`corner`); `wide` if they are many and short."""

    name: str
    title: str
    corner: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    wide: bool = False


def short(domain: str) -> str:
    """The name of a domain in the paper's tables.

    >>> short("gaussian_noise"), short("far_focus")
    ('Gaussian', 'far focus')
    """
    return SHORT.get(domain, domain.replace("_", " "))


def _cell(metric: Metric, found: Stat, std: bool = True) -> Cell:
    if not found.n:
        return Cell(NOTHING)
    after = f"({metric.text(found.std)})" if std and found.std is not None else ""
    return Cell(metric.text(found.mean), after)


def _mark(columns: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Mark the lowest value of each column and those printed the same. A column of equal values has no best."""
    marked = []
    for column in columns:
        values = [_finite(cell.text) for cell in column]
        known = [value for value in values if value is not None]
        best = min(known) if len(set(known)) > 1 else None
        marked.append([Cell(c.text, c.after, v is not None and v == best) for c, v in zip(column, values, strict=True)])
    return marked


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _lines(rows: Sequence[ResultRow], columns: Sequence[Sequence[Cell]]) -> tuple[Line, ...]:
    first = next((n for n, row in enumerate(rows) if row.method == "petal"), 0)
    labels = [marked(row) + " (unfinished)" * (not row.jobs) for row in rows]
    return tuple(
        Line(label, tuple(column[n] for column in columns), rule=n > 0 and n == first) for n, label in enumerate(labels)
    )


def marked(row: ResultRow) -> str:
    """The label of a row, with a mark if it uses the order of the images."""
    return row.label + ORDERED * row.ordered


def informed(rows: Sequence[ResultRow]) -> tuple[str, ...]:
    """The note that rows with the mark of order need."""
    return (INFORMED,) if any(row.ordered for row in rows) else ()


def domain_table(section: Section, metric: str = "error") -> Table:
    """Methods by domains, and the mean with its standard deviation, as in the paper's Tables 1 and 2."""
    how = METRICS[metric]
    brief = replace(how, digits=min(how.digits, 3))   # fifteen columns must fit on a page; the mean has all digits
    columns = [[_cell(brief, row.stat(metric, domain), std=False) for row in section.rows] for domain in section.domains]
    columns.append([_cell(how, row.stat(metric)) for row in section.rows])
    return Table(
        name=f"{section.slug}-{metric}",
        title=f"{how.title} by domain, {section.title}",
        corner="Method",
        columns=(*(short(domain) for domain in section.domains), "Mean"),
        lines=_lines(section.rows, _mark(columns)),
        notes=informed(section.rows),
        wide=True,
    )


def visit_table(section: Section, metric: str = "error") -> Table:
    """Methods by visits of a recurring stream, and the mean."""
    how = METRICS[metric]
    brief = replace(how, digits=min(how.digits, 3))
    scores = [row.by_visit(metric) for row in section.rows]
    columns = [
        [_cell(brief, found[visit], std=False) if visit < len(found) else Cell(NOTHING) for found in scores]
        for visit in range(section.visits)
    ]
    columns.append([_cell(how, row.stat(metric)) for row in section.rows])
    return Table(
        name=f"{section.slug}-{metric}-visits",
        title=f"{how.title} by visit, {section.title}",
        corner="Method",
        columns=(*(str(visit) for visit in range(1, section.visits + 1)), "Mean"),
        lines=_lines(section.rows, _mark(columns)),
        notes=("Each visit goes through all domains once.", *informed(section.rows)),
        wide=True,
    )


def metric_table(section: Section) -> Table:
    """Every score of each method over the whole stream, as in the paper's Tables 3 to 6."""
    columns = _mark([[_cell(how, row.stat(how.name)) for row in section.rows] for how in METRICS.values()])
    told = ["ms per batch"]
    columns.append([Cell(f"{1000 * row.seconds:.1f}" if math.isfinite(row.seconds) else NOTHING) for row in section.rows])
    if section.manifest.get("rate"):
        told.append("learned from")
        columns.append([Cell(f"{100 * row.learned_share:.1f} %" if row.jobs else NOTHING) for row in section.rows])
    columns.append([Cell(row.over) for row in section.rows])
    return Table(
        name=f"{section.slug}-metrics",
        title=f"All scores, {section.title}",
        corner="Method",
        columns=(*(how.title for how in METRICS.values()), *told, "averaged over"),
        lines=_lines(section.rows, columns),
        notes=informed(section.rows),
    )


def cost_table(section: Section) -> Table:
    """The cost of each method: images, passes of networks, share of batches with views, share of weights restored, time."""

    def cells(row: ResultRow) -> list[Cell]:
        if not row.jobs:
            return [Cell(NOTHING)] * len(columns)
        return [
            Cell(f"{row.images:,}"),
            Cell(f"{row.batches:,}"),
            Cell(_passes(row.forwards)),
            Cell(_passes(row.backwards)),
            Cell(f"{row.views_share:.1%}".replace("%", " %")),
            Cell(f"{100 * row.restored_share:.2f} %"),
            Cell(f"{1000 * row.seconds:.1f}" if math.isfinite(row.seconds) else NOTHING),
            Cell(str(row.skipped)),
            *([Cell(f"{100 * row.learned_share:.1f} %")] if missed else []),
        ]

    missed = bool(section.manifest.get("rate"))
    columns = ("images per run", "batches per run", "forwards per batch", "backwards per batch", "batches with views",
               "restored per batch", "ms per batch (median)", "updates skipped",
               *(["batches learned from"] if missed else []))  # fmt: skip
    by_row = [cells(row) for row in section.rows]
    return Table(
        name=f"{section.slug}-cost",
        title=f"Cost, {section.title}",
        corner="Method",
        columns=columns,
        lines=_lines(section.rows, list(zip(*by_row, strict=True))),
        notes=informed(section.rows),
    )  # fmt: skip


def _passes(count: float) -> str:
    return f"{count:.2f}".rstrip("0").rstrip(".") if math.isfinite(count) else NOTHING


def paper_tables(section: Section) -> list[Table]:
    """The paper's numbers for this benchmark: ours compared with them, and its own table by corruption."""
    compared = comparison(section)
    return [*([compared] if compared else []), *published_tables(section)]


def published_tables(section: Section) -> list[Table]:
    """The paper's own tables by corruption for this benchmark."""
    return [_published_table(section, table) for table in published(section.recipe) if table.by_domain]


def paper_values(section: Section, row: ResultRow) -> dict[str, tuple[Value, int]]:
    """The paper's scores for a row, by metric, each with the number of its table."""
    found = {}
    for table in published(section.recipe):
        name = lookup(table, row.paper)
        if name is not None:
            found.update({metric: (value, table.number) for metric, value in table.scores[name].items()})
    return found


def comparison(section: Section) -> Table | None:
    """Our scores beside the paper's; None if it has none of these rows."""
    tables = published(section.recipe)
    metrics = [m for m in METRICS.values() if any(m.name in scores for t in tables for scores in t.scores.values())]
    rows = [row for row in section.rows if row.jobs and paper_values(section, row)]
    if not rows or not metrics:
        return None
    columns: list[list[Cell]] = []
    for how in metrics:
        trio: tuple[list[Cell], list[Cell], list[Cell]] = ([], [], [])
        for row in rows:
            ours, theirs = row.stat(how.name), paper_values(section, row).get(how.name)
            trio[0].append(_cell(how, ours))
            trio[1].append(Cell(theirs[0].text if theirs else NOTHING))
            trio[2].append(Cell(_minus(how.text(ours.mean - theirs[0].mean, sign=True)) if theirs else NOTHING))
        columns += trio
    numbers = sorted({number for row in rows for _, number in paper_values(section, row).values()})
    where = "Table " + str(numbers[0]) if len(numbers) == 1 else "Tables " + " and ".join(map(str, numbers))
    notes = [
        "Difference: ours minus the paper's. Source network, data and images may differ from the paper's: see What was run.",
        *dict.fromkeys(f"Paper's Table {t.number}: {t.over}." for t in tables if t.over),
        *(remark for t in tables for remark in t.remarks),
        *informed(rows),
    ]
    severity = section.manifest.get("severity")
    if not section.gradual and isinstance(severity, int) and severity != 5:
        notes.insert(0, f"The paper's numbers are for severity 5; these runs are at severity {severity}.")
    return Table(
        name=f"{section.slug}-paper",
        title=f"Comparison with the paper's {where}, {section.title}",
        corner="Method",
        columns=tuple(f"{how.title} {what}" for how in metrics for what in ("ours", "paper", "difference")),
        lines=_lines(rows, columns),
        notes=tuple(notes),
    )


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _published_table(section: Section, table: Published) -> Table:
    domains = [d for d in section.domains if d in CORRUPTIONS] or list(CORRUPTIONS)
    names = list(table.scores)
    columns = [[Cell(table.by_domain[name][CORRUPTIONS.index(domain)]) for name in names] for domain in domains]
    means = [table.scores[name]["error"].text.partition(" ") for name in names]
    columns.append([Cell(mean, std) for mean, _, std in means])
    marked = _mark(columns)
    first = next(n for n, name in enumerate(names) if name.startswith("PETAL"))
    lines = (Line(name, tuple(c[n] for c in marked), rule=n == first) for n, name in enumerate(names))
    return Table(
        name=f"{section.slug}-paper-table-{table.number}",
        title=f"The paper's Table {table.number}: error (%), {table.title}",
        corner="Method",
        columns=(*(short(domain) for domain in domains), "Mean"),
        lines=tuple(lines),
        notes=(f"In brackets: {table.over}.", "TENT-online is told when the domain changes."),
        wide=True,
    )


def summary(section: Section) -> str:
    """One sentence with the result."""
    best, rows = section.best(), [row for row in section.rows if row.jobs]
    if best is None:
        return "No finished run yet."
    error = METRICS["error"]
    text = f"Lowest error: {marked(best)}, {error.text(best.stat('error').mean)} %"
    others = [row for row in rows if row is not best]
    named = [row for row in others if row.method == "source"][:1]
    second = min((row for row in others if row not in named), key=lambda row: row.stat("error").mean, default=None)
    parts = [f"{row.label} {error.text(row.stat('error').mean)} %" for row in (second, *named) if row is not None]
    return f"{text} ({'; '.join(parts)})." if parts else f"{text}."


def run_tables(report: Report) -> list[Table]:
    """What was run: for each folder the settings in its manifest."""
    return [
        Table(f"run-{folder.name}", f"Run folder {folder.name}", "setting", ("value",),
              tuple(Line(name, (Cell(value),)) for name, value in _settings(folder.manifest)))
        for folder in report.folders
    ]  # fmt: skip


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    known = ("recipe", "title", "fidelity", "created", "command", "device", "device_name", "engine", "severity",
             "batch_size", "images", "visits", "label_correlation", *ORDER, "orders", "seeds", "network", "data", "weights",
             "posterior", "versions")  # fmt: skip
    names = [n for n in known if n in manifest] + [n for n in manifest if n not in (*known, "format", "jobs", "classes")]
    pairs: list[tuple[str, str]] = []
    for name in names:
        value = manifest[name]
        if name == "command" and isinstance(value, list):
            value = " ".join(map(str, value))
        inner = flatten(value) if isinstance(value, dict) else {"": value}
        pairs += [(f"{name.replace('_', ' ')} {key}".strip(), _said(v)) for key, v in inner.items()]
    return pairs


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    return "none" if value is None else str(value)


def options_table(section: Section) -> Table:
    """The arguments of each method as they were used."""
    lines = []
    for row in section.rows:
        options = ", ".join(f"{name}={_said(value)}" for name, value in flatten(dict(row.options)).items())
        what = f"{row.method}" + (f", {row.fidelity} fidelity" if row.fidelity else "")
        lines.append(Line(row.label, (Cell(what), Cell(options or "none given"), Cell(_seeds(row)))))
    return Table(f"{section.slug}-options", f"Settings, {section.title}", "Row", ("method", "options", "orders and seeds"),
                 tuple(lines))  # fmt: skip


def _seeds(row: ResultRow) -> str:
    jobs = row.jobs or row.unfinished
    orders, seeds = (list(dict.fromkeys(getattr(j, name) for j in jobs if getattr(j, name))) for name in ("order", "seed"))
    parts = [f"{'order' if len(v) == 1 else 'orders'} {', '.join(v)}" if k == "order" else
             f"{'seed' if len(v) == 1 else 'seeds'} {', '.join(v)}" for k, v in (("order", orders), ("seed", seeds)) if v]
    return "; ".join(parts) or NOTHING
