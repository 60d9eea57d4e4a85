"""The whole report as one HTML file: no network, no scripts, legible on a phone, a laptop and paper."""

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

from petal._files import replacing
from petal._version import __version__
from petal.errors import DataError
from petal.report.figures import WIDTH, Drawing, draw
from petal.report.scores import METRICS, Report, Section, load
from petal.report.tables import Cell, Line, Table, domain_table, options_table, provenance, summary, tables

_CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #59636e; --page: #ffffff; --line: #d5dae0; --band: #f3f5f8;
  --best: #0a5c36; --bestbg: #e3f4ea; --note: #fff6e0; --noteline: #d9a400; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #a3adb8; --page: #14181c; --line: #3a424b;
  --band: #1f252b; --best: #8fe0b2; --bestbg: #173626; --note: #2d2713; --noteline: #b98f1a; --link: #8cc4ff; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem clamp(.9rem, 3vw, 2.5rem) 3rem; max-width: 1280px; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: clamp(1.45rem, 1rem + 2vw, 2.1rem); line-height: 1.2; margin: .2rem 0 .4rem; }
h2 { font-size: 1.4rem; margin: 2.6rem 0 .6rem; padding-bottom: .25rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .5rem 0; max-width: 75ch; }
a { color: var(--link); }
.lead, header p { max-width: none; }
.lead { font-size: 1.12rem; font-weight: 600; }
.soft, figcaption, .after { color: var(--soft); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .8rem 0 0; padding: 0; }
.notes { background: var(--note); border-left: 4px solid var(--noteline); padding: .6rem 1rem; margin: 1rem 0;
  border-radius: 3px; }
.notes h3 { margin: 0; }
.notes ul { margin: .3rem 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; margin: 1.6rem 0 .4rem; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; font-size: 1.02rem; padding: .2rem 0 .5rem; }
caption span { display: inline-block; max-width: calc(100vw - 2.2rem); }
th, td { padding: .28rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; font-weight: 600; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); z-index: 1; }
tr.rule > * { border-top: 2px solid var(--soft); }
tbody tr:hover > * { background: var(--band); }
table.wide thead th.turn span { writing-mode: vertical-rl; transform: rotate(200deg); display: inline-block;
  transform-origin: center; }
table.wide th, table.wide td { padding-left: .36rem; padding-right: .36rem; }
table.wide tr > :last-child { position: sticky; right: 0; background: var(--page); padding-left: .7rem;
  border-left: 1px solid var(--line); }
table.wide td.best:last-child { background: var(--bestbg); }
table.wide thead th.turn { padding-left: .2rem; padding-right: .2rem; text-align: center; }
td.best { font-weight: 700; color: var(--best); background: var(--bestbg); }
.after { font-weight: 400; }
table.words td, table.words th { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; }
table.words th { min-width: 8.5rem; font-weight: 500; }
table.words td { min-width: 6rem; }
figure { margin: 1.4rem 0; }
figure .paper { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }
figure img { display: block; height: auto; margin: 0 auto; }
figcaption { font-size: .9rem; margin-top: .4rem; max-width: 100ch; }
details summary { cursor: pointer; font-weight: 600; margin: .8rem 0; }
footer { margin-top: 3rem; font-size: .85rem; color: var(--soft); border-top: 1px solid var(--line); padding-top: .6rem; }
@media (max-width: 640px) { body { font-size: 15px; } th, td { padding: .25rem .38rem; }
  table.words th { position: static; min-width: 6rem; } th:first-child { max-width: 8.5rem; white-space: normal; } }
@media print {
  :root { --ink: #000; --soft: #444; --page: #fff; --line: #bbb; --band: #fff; --best: #000; --bestbg: #e8e8e8;
    --note: #fff; --noteline: #000; --link: #000; color-scheme: light; }
  @page { size: A4; margin: 13mm 12mm; }
  body { font-size: 9.5pt; max-width: none; padding: 0; }
  nav { display: none; }
  .scroll, figure .paper { overflow: visible; }
  table { font-size: 7.4pt; } th, td { padding: 1.5pt 2.6pt; }
  th:first-child, table.wide tr > :last-child { position: static; } th:first-child { white-space: normal; }
  figure .paper { border: 0; padding: 0; } figure img { min-width: 0 !important; max-height: 215mm; object-fit: contain; }
  figure, table, .notes { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
}
"""


def write_html(
    runs: "Report | str | Path | Iterable[str | Path]",
    path: str | Path,
    *,
    paper: bool = False,
    metrics: Iterable[str] = tuple(METRICS),
    title: str | None = None,
) -> Path:
    """Write the report of one or several run folders (or of a loaded report) as one self-contained file."""
    if isinstance(runs, (str, Path)):
        runs = [runs]
    report = runs if isinstance(runs, Report) else load(*runs)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(html(report, paper=paper, metrics=metrics, title=title), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path


def html(
    report: Report, *, paper: bool = False, metrics: Iterable[str] = tuple(METRICS), title: str | None = None
) -> str:
    """The page as text."""
    metrics, name = tuple(metrics), escape(title or report.title)
    links = [(f"s{n}", section.title) for n, section in enumerate(report.sections, 1)] + [("run", "What was run")]
    if len(report.sections) == 1:
        links = [("s1", "Results"), ("s1-figures", "Figures"), ("run", "What was run")]
    body = [f"<header><h1>{name}</h1>", f'<p class="soft">{escape(_subtitle(report))}</p>']
    body += [f"<p>{escape(note)}</p>" for note in report.notes]
    items = [f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in links]
    body += ['<nav aria-label="On this page"><ul>', *items, "</ul></nav>"]
    body += ["</header><main>"]
    for number, section in enumerate(report.sections, 1):
        body.append(_section(section, f"s{number}", metrics, paper))
    body += [_what_was_run(report), "</main>"]
    body += [f"<footer>Made by <code>petal report</code> (petal {escape(__version__)}) from the records alone. Means are "
             "over all images of a run; standard deviations are over runs.</footer>"]
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{name}</title>",
        f"<style>{_CSS}</style>", "</head>", "<body>", *body, "</body>", "</html>", "",
    ])  # fmt: skip


def _subtitle(report: Report) -> str:
    rows = [row for section in report.sections for row in section.rows]
    runs = sum(len(row.jobs) + len(row.unfinished) for row in rows)
    finished = [records for row in rows for records in row.records]
    images = sum(int(records.n.sum()) for records in finished)
    created = sorted(str(folder.manifest["created"]) for folder in report.folders if folder.manifest.get("created"))
    made = [created[0][:16].replace("T", " ")] if created else []
    known = [folder.manifest.get("device_name") or folder.manifest.get("device") for folder in report.folders]
    devices = dict.fromkeys(str(name) for name in known if name)
    parts = [f"{len(rows)} methods", f"{len(finished)} of {runs} runs finished", f"{images:,} predictions"]
    return " · ".join([*parts, *devices, *made])


def _section(section: Section, anchor: str, metrics: tuple[str, ...], paper: bool) -> str:
    out = [f'<section id="{anchor}"><h2>{escape(section.title)}</h2>']
    out += [f'<p class="lead">{escape(summary(section))}</p>']
    out += ['<div class="notes"><h3>Before you read the numbers</h3><ul>',
            *(f"<li>{escape(note)}</li>" for note in section.notes()), "</ul></div>"]
    out += [_table(table) for table in tables(section, metrics[:1], paper)]
    out.append(f'<h2 id="{anchor}-figures">Figures</h2>')
    drawings = draw(section)
    out += [_figure(drawing) for drawing in drawings] or ["<p>No finished run: nothing to draw yet.</p>"]
    if metrics[1:]:
        out.append("<h2>The other scores by domain</h2>")
        out += [_table(domain_table(section, metric)) for metric in metrics[1:]]
    return "\n".join([*out, "</section>"])


def _table(table: Table, words: bool = False) -> str:
    kind = "words" if words else "wide" if table.wide else "plain"
    turned = set(table.columns[:-1]) if table.wide else set()
    head = [f'<th scope="col">{escape(table.corner)}</th>']
    for heading in table.columns:
        inner = f"<span>{escape(heading)}</span>"
        head.append(f'<th scope="col" class="turn">{inner}</th>' if heading in turned else f'<th scope="col">{inner}</th>')
    rows = [_row(line) for line in table.lines]
    notes = [f'<p class="soft">{escape(note)}</p>' for note in table.notes]
    label = escape(table.title, quote=True)
    return "\n".join([
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="{kind}">',
        f"<caption><span>{escape(table.title)}</span></caption>",
        f"<thead><tr>{''.join(head)}</tr></thead>", "<tbody>", *rows,
        "</tbody></table></div>", *notes,
    ])  # fmt: skip


def _row(line: Line) -> str:
    cells = "".join(_cell(cell) for cell in line.cells)
    return f'<tr{" class=rule" if line.rule else ""}><th scope="row">{escape(line.label)}</th>{cells}</tr>'


def _cell(cell: Cell) -> str:
    text = f"<strong>{escape(cell.text)}</strong>" if cell.best else escape(cell.text)
    after = f' <span class="after">{escape(cell.after)}</span>' if cell.after else ""
    return f'<td class="best">{text}{after}</td>' if cell.best else f"<td>{text}{after}</td>"


def _figure(drawing: Drawing) -> str:
    kind = "png" if drawing.photographic else "svg"
    mime = "image/png" if kind == "png" else "image/svg+xml"
    data = base64.b64encode(drawing.render(kind)).decode("ascii")
    alt = escape(f"{drawing.title}. {drawing.caption}", quote=True)
    share = min(100, round(100 * drawing.figure.get_figwidth() / WIDTH))   # all figures with letters of one size
    return (f'<figure><h3>{escape(drawing.title)}</h3><div class="paper" tabindex="0" role="region" '
            f'aria-label="{escape(drawing.title, quote=True)}"><img src="data:{mime};base64,{data}" alt="{alt}" '
            f'style="width:{share}%;min-width:{6.2 * share:.0f}px"></div>'
            f"<figcaption>{escape(drawing.caption)}</figcaption></figure>")


def _what_was_run(report: Report) -> str:
    out = ['<section id="run"><h2>What was run</h2>']
    out += [_table(options_table(section), words=True) for section in report.sections]
    for name, pairs in provenance(report):
        lines = tuple(Line(key, (Cell(value),)) for key, value in pairs)
        out.append(_table(Table("run", f"Run folder {name}", "setting", ("value",), lines), words=True))
    return "\n".join([*out, "</section>"])
