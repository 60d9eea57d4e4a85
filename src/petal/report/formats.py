"""Tables as text: for the terminal, Markdown, LaTeX, CSV and JSON. Names from files are escaped in each."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from petal._version import __version__
from petal.report.compare import rank_table, verdict
from petal.report.contents import details, first, rest, tables
from petal.report.metric import METRICS, Stat
from petal.report.scores import Report, Section
from petal.report.summaries import FORMAT, to_text
from petal.report.tables import Line, Table, options_table, paper_values, run_tables, short

Links = Mapping[str, Sequence[tuple[str, str, str]]]   # section -> (title, caption, address) of its figures


# Terminal


class TerminalTable:
    """A table that fits the terminal: with full headings, else with cut ones, else in several blocks of columns."""

    def __init__(self, table: Table):
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table in as many blocks as the width requires."""
        table = self.table
        yield Text(table.title, style="bold")
        room = options.max_width - 2 - max(len(table.corner), *(len(line.label) for line in table.lines))
        values = [max(len(line.cells[n].plain) for line in table.lines) for n in range(len(table.columns))]
        cut = [heading[: max(5, v)] if table.wide else heading for heading, v in zip(table.columns, values, strict=True)]
        for headings in (list(table.columns), cut, list(table.columns)):
            widths = [max(_longest_word(h), v) + 2 for h, v in zip(headings, values, strict=True)]
            if sum(widths) <= room:
                break
        for block in _blocks(widths, room):
            yield self._block(headings, block)
        for note in table.notes:
            yield Text(note, style="dim")

    def _block(self, headings: Sequence[str], columns: Iterable[int]) -> RichTable:
        columns = list(columns)
        block = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
        block.add_column(Text(self.table.corner), no_wrap=True)
        for n in columns:
            block.add_column(Text(headings[n]), justify="right", overflow="fold")
        for number, line in enumerate(self.table.lines):
            if line.rule and number:
                block.add_section()
            block.add_row(Text(line.label), *(_terminal_cell(line, n) for n in columns))
        return block


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns in as few blocks as fit, as even as they can be.

    >>> _blocks([4, 4, 4, 4], room=13), _blocks([4, 4], room=80)
    ([[0, 1], [2, 3]], [[0, 1]])
    """

    def fill(room: int) -> list[list[int]]:
        blocks: list[list[int]] = [[]]
        for n in range(len(widths)):
            if blocks[-1] and sum(widths[i] for i in (*blocks[-1], n)) > room:
                blocks.append([])
            blocks[-1].append(n)
        return blocks

    fewest = len(fill(room))
    return next(blocks for size in range(1, room + 1) if len(blocks := fill(size)) == fewest) if room > 0 else fill(room)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _terminal_cell(line: Line, n: int) -> Text:
    cell = line.cells[n]
    text = Text(cell.text, style="bold green" if cell.best else "")
    return text.append(f" {cell.after}", style="not bold default") if cell.after else text


def terminal(report: Report, metrics: Iterable[str] = ("error",), paper: bool = False) -> RenderableType:
    """Everything to print; it is fitted to the width of the terminal when it is printed."""
    parts: list[RenderableType] = [Text(note) for note in report.notes]
    ranks = rank_table(report)
    if ranks is not None:
        parts += [TerminalTable(ranks), Text("")]
    for section in report.sections:
        for table in tables(section, metrics, paper):
            parts.append(TerminalTable(table))
        parts += [Text(f"• {note}", style="dim") for note in section.notes()]
        parts += [Text(""), Text(verdict(section), style="bold"), Text("")]
    parts += [line for remark in report.remarks for line in (Text(remark), Text(""))]
    return Group(*parts[:-1])


# Markdown


def escape_markdown(text: str) -> str:
    r"""Text that Markdown shows as it is.

    >>> print(escape_markdown("a|b_c*"))
    a\|b\_c\*
    """
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(text.split()))


def markdown_table(table: Table) -> str:
    """One table, the best of each column bold."""
    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    left = {"options", "method", "orders and seeds", "averaged over", "value"}
    out = [
        row(escape_markdown(heading) for heading in (table.corner, *table.columns)),
        row(["---", *("---" if heading in left else "---:" for heading in table.columns)]),
    ]
    for line in table.lines:
        cells = []
        for cell in line.cells:
            text = escape_markdown(cell.text)
            cells.append(f"**{text}**{' ' + escape_markdown(cell.after) if cell.after else ''}" if cell.best
                         else escape_markdown(cell.plain))
        out.append(row([escape_markdown(line.label), *cells]))
    return "\n".join(out)


def markdown(
    report: Report, metrics: Iterable[str] = tuple(METRICS), paper: bool = False, figures: Links | None = None
) -> str:
    """A complete page: verdicts, then a table, a figure and the rest for each section, by domain, and what was run."""
    metrics = tuple(metrics)
    out = [f"# {escape_markdown(report.title)}", *map(escape_markdown, report.notes)]
    if len(report.sections) > 1:
        out.append("\n".join(f"- {escape_markdown(f'{s.title}. {verdict(s)}')}" for s in report.sections))
    for section in report.sections:
        drawings = [_markdown_figure(*drawing) for drawing in (figures or {}).get(section.slug, ())]
        out += [f"## {escape_markdown(section.title)}", escape_markdown(verdict(section)), _markdown_part(first(section))]
        out += drawings[:1]
        out += ["### Before you use the numbers", "\n".join(f"- {escape_markdown(note)}" for note in section.notes())]
        out += [_markdown_part(table) for table in rest(section, metrics, paper)] + drawings[1:]
    ranks = rank_table(report)
    out += [] if ranks is None else ["## Over all streams", _markdown_part(ranks)]
    if report.remarks:
        out += ["## Remarks", *map(escape_markdown, report.remarks)]
    out.append("## By domain")
    out += [_markdown_part(table) for section in report.sections for table in details(section, metrics, paper)]
    out.append("## What was run")
    out += [_markdown_part(options_table(section)) for section in report.sections]
    return "\n\n".join([*out, *map(_markdown_part, run_tables(report)), _made_by()]) + "\n"


def _markdown_figure(title: str, caption: str, address: str) -> str:
    name = escape_markdown(title)
    return f"### {name}\n\n![{name}]({address})\n\n{escape_markdown(caption)}"


def _markdown_part(table: Table) -> str:
    parts = [f"### {escape_markdown(table.title)}", markdown_table(table), *map(escape_markdown, table.notes)]
    return "\n\n".join(parts)


def _made_by() -> str:
    return "Made by `petal report` from the records of these runs."


# LaTeX

_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
          "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
          "|": r"\textbar{}", "–": "--", "−": "$-$", "±": r"$\pm$", "†": r"\dag{}"}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Text that LaTeX sets as it is.

    >>> print(escape_latex("50 % of a_b"))
    50 \% of a\_b
    """
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def latex_table(table: Table) -> str:
    """One float in the style of booktabs."""
    headings = [escape_latex(heading) for heading in table.columns]
    if table.wide:
        headings = [*(rf"\rotatebox{{70}}{{{heading}}}" for heading in headings[:-1]), headings[-1]]
    body = [" & ".join([escape_latex(table.corner), *headings]) + r" \\", r"\midrule"]
    for number, line in enumerate(table.lines):
        if line.rule and number:
            body.append(r"\midrule")
        cells = []
        for cell in line.cells:
            text = rf"\textbf{{{escape_latex(cell.text)}}}" if cell.best else escape_latex(cell.text)
            cells.append(f"{text} {escape_latex(cell.after)}".strip())
        body.append(" & ".join([escape_latex(line.label), *cells]) + r" \\")
    caption = " ".join([f"{table.title}.", *table.notes])
    return "\n".join([
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{tab:{re.sub(r'[^A-Za-z0-9:.-]', '-', table.name)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table*}",
    ])  # fmt: skip


def latex(report: Report, metrics: Iterable[str] = ("error",), paper: bool = False) -> str:
    """Every table as a float, the notes as comments."""
    metrics = tuple(metrics)
    out = [rf"% {_comment(report.title)}", f"% Made by petal report (petal {__version__}).",
           r"% Needs \usepackage{booktabs} and \usepackage{graphicx}.",
           *(f"% {_comment(note)}" for note in report.notes)]
    out += [f"% {_comment(remark)}" for remark in report.remarks]
    ranks = rank_table(report)
    if ranks is not None:
        out += ["", latex_table(ranks)]
    for section in report.sections:
        out += ["", *(f"% {_comment(note)}" for note in section.notes())]
        for table in tables(section, metrics, paper):
            out += ["", latex_table(table)]
    return "\n".join(out) + "\n"


def _comment(text: str) -> str:
    return " ".join(text.split())


# Data


def to_csv(report: Report, metrics: Iterable[str] = tuple(METRICS), paper: bool = False) -> str:
    """One line per benchmark, method and metric, in the units of the tables (errors in per cent)."""
    metrics = tuple(metrics)
    domains = list(dict.fromkeys(domain for section in report.sections for domain in section.domains))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    beside = ["paper", "paper_std", "difference"] if paper else []
    writer.writerow(["benchmark", "method", "fidelity", "metric", *domains, "mean", "std", "runs", "unfinished", *beside])
    for section in report.sections:
        for row in section.rows:
            published = paper_values(section, row)
            for name in metrics:
                how = METRICS[name]

                def number(value: float | None, scale: float = how.scale) -> str:
                    return "" if value is None or math.isnan(value) else format(value * scale, ".8g")

                whole = row.stat(name)
                cells = [number(row.stat(name, domain).mean) for domain in domains]
                line = [section.title, row.label, row.fidelity, how.title, *cells]
                line += [number(whole.mean), number(whole.std), str(whole.n), str(len(row.unfinished))]
                if paper:
                    theirs = published[name][0] if name in published else None
                    line += [number(theirs.mean), number(theirs.std)] if theirs else ["", ""]
                    line += [number(whole.mean - theirs.mean)] if theirs and whole.n else [""]
                writer.writerow(line)
    return stream.getvalue()


def to_json(report: Report, metrics: Iterable[str] = tuple(METRICS), paper: bool = False) -> str:
    """The whole report as data; scores are fractions."""
    metrics = tuple(metrics)
    data = {
        "format": "petal-report-1",
        "title": report.title,
        "petal": __version__,
        "notes": report.notes,
        "remarks": report.remarks,
        "sections": [_section(section, metrics, paper) for section in report.sections],
        "runs": [{"folder": str(folder.path), "manifest": folder.manifest} for folder in report.folders],
    }
    return json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def to_summary(report: Report) -> str:
    """The summaries of the finished runs as data, from which `load` makes the same report again without the records."""
    runs = []
    for folder in report.folders:
        kept = {job.id: job.summary for job in folder.jobs if job.finished}
        rows, jobs = dict[str, Any](), dict[str, Any]()
        for about in folder.manifest["jobs"]:
            if about["id"] in kept:
                found = kept[about["id"]]
                own = {"row": about["row"], "order": about.get("order"), "seed": about.get("seed")}
                jobs[about["id"]] = own | ({} if found is None else found.to_json())
                rows[about["row"]] = {name: value for name, value in about.items() if name not in ("id", "order", "seed")}
        manifest = {name: value for name, value in folder.manifest.items() if name != "jobs"}
        runs.append({"folder": folder.name, "manifest": manifest, "rows": list(rows.values()), "jobs": jobs})
    averages = [
        {"jobs": [[job.folder.parents[1].name, job.id] for job in row.jobs], "runs": row.averages.runs,
         "std": row.averages.std, **row.averages.means.to_json()}
        for section in report.sections for row in section.rows if row.averages is not None
    ]  # fmt: skip
    data = {"format": FORMAT, "title": report.title, "notes": report.notes, "remarks": report.remarks, "runs": runs}
    return to_text(_finite(data | ({"averages": averages} if averages else {}))) + "\n"


def _section(section: Section, metrics: Sequence[str], paper: bool) -> dict[str, Any]:
    rows = []
    for row in section.rows:
        entry: dict[str, Any] = {
            "row": row.id, "method": row.method, "label": row.label, "fidelity": row.fidelity, "options": row.options,
            "runs": len(row.jobs), "orders": row.orders, "seeds": row.seeds,
            "unfinished": [{"job": job.id, "batches": job.batches} for job in row.unfinished],
            "mean": {name: _stat(row.stat(name)) for name in metrics},
            "by_domain": {domain: {name: _stat(row.stat(name, domain)) for name in metrics} for domain in section.domains},
            "by_visit": {name: [_stat(found) for found in row.by_visit(name)] for name in metrics},
            "alarms": row.alarms,
            "images": row.images, "views_share": row.views_share, "restored_share": row.restored_share,
            "forwards": row.forwards, "backwards": row.backwards, "median_seconds": row.seconds, "skipped": row.skipped,
            "learned_share": row.learned_share,
        }  # fmt: skip
        if paper:
            entry["paper"] = {name: {"mean": value.mean, "std": value.std, "table": number,
                                     "difference": row.stat(name).mean - value.mean}
                              for name, (value, number) in paper_values(section, row).items()}
        rows.append(entry)
    return {"title": section.title, "protocol": section.protocol, "recipe": section.recipe, "domains": section.domains,
            "headings": [short(domain) for domain in section.domains], "rows": rows, "notes": section.notes()}  # fmt: skip


def _stat(found: Stat) -> dict[str, Any]:
    return {"mean": found.mean, "std": found.std, "n": found.n}


def _finite(value: Any) -> Any:
    """The same data with null for numbers that JSON does not have (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
