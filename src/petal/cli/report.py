"""`petal report`: tables, figures and pages from run folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from petal._files import replacing
from petal.cli.common import make_console
from petal.errors import ConfigError, DataError


class Format(StrEnum):
    """How a report is written."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    html = "html"
    json = "json"
    parquet = "parquet"
    data = "data"


class MetricName(StrEnum):
    """The score of the tables by domain."""

    error = "error"
    nll = "nll"
    brier = "brier"
    ece = "ece"


class FigureType(StrEnum):
    """The file type of figures."""

    png = "png"
    svg = "svg"
    pdf = "pdf"


_BY_SUFFIX = {".md": Format.markdown, ".tex": Format.latex, ".csv": Format.csv, ".html": Format.html, ".htm": Format.html,
              ".json": Format.json, ".parquet": Format.parquet, ".txt": Format.terminal}  # fmt: skip
_FIRST = {Format.terminal, Format.latex}   # these show the error by domain unless asked; the others every score


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders written by `petal run` or `petal sweep`, "
                                                 "or files written by `petal report --format data`.")],
    format: Annotated[
        Format | None,
        typer.Option("--format", "-f", show_default=False, help="By default what the name of --out says, else terminal. "
                     "data: scores of all runs in a small file, from which `petal report FILE` makes the same pages again."),
    ] = None,
    metric: Annotated[
        MetricName | None,
        typer.Option(help="Score of the table by domain; by default error, and all of them on pages.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this file instead of the terminal.", show_default=False)
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the figures into this folder.", show_default=False)
    ] = None,
    figure_type: Annotated[
        list[FigureType] | None,
        typer.Option(help="File type of the figures; may be given again. By default png.", show_default=False),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Show the paper's own numbers beside these.")] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="The row that others are compared with, by default the best.", show_default=False),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the report.", show_default=False)] = None,
    note: Annotated[
        list[str] | None, typer.Option(help="Words of your own, shown on top; may be given again.", show_default=False)
    ] = None,
    remark: Annotated[
        list[str] | None, typer.Option(help="The same, shown after the results.", show_default=False)
    ] = None,
) -> None:
    """Show run folders as the paper's tables, as figures and as a page."""
    console = make_console()
    chosen = format or (_BY_SUFFIX.get(out.suffix.lower()) if out is not None else None)
    if chosen is None:
        if out is not None:
            raise ConfigError(f"cannot tell the format of {out} from its name; say it with --format")
        chosen = Format.terminal
    from petal import report as reports  # matplotlib takes a second to import

    loaded = reports.load(*runs, title=title, notes=note or (), remarks=remark or (), against=against)
    metrics = [metric.value] if metric else ["error"] if chosen in _FIRST else list(reports.METRICS)
    links: dict[str, list[tuple[str, str, str]]] = {}
    if figures is not None:
        written = reports.write_figures(loaded, figures, [kind.value for kind in figure_type or [FigureType.png]])
        start = out.parent if out is not None else Path()
        for slug, drawings in written.items():
            links[slug] = [(drawing.title, drawing.caption, _address(path, start)) for drawing, path in drawings]
    if chosen is Format.html:
        target = out or (runs[0].with_suffix(".html") if runs[0].is_file() else runs[0] / "report.html")
        reports.write_html(loaded, target, paper=paper, metrics=metrics)
        _say(console, f"wrote {target}")
    elif chosen is Format.parquet:
        out = out or runs[0] / "records.parquet"
        reports.write_parquet(loaded, out)
    elif chosen is Format.terminal:
        shown = reports.terminal(loaded, metrics, paper)
        if out is None:
            console.print(shown)
        else:
            with _open(out) as temporary, temporary.open("w", encoding="utf-8") as file:
                Console(file=file, width=160).print(shown)
    else:
        make = {Format.latex: reports.latex, Format.csv: reports.to_csv, Format.json: reports.to_json}
        if chosen is Format.markdown:
            text = reports.markdown(loaded, metrics, paper, links)
        else:
            text = reports.to_summary(loaded) if chosen is Format.data else make[chosen](loaded, metrics, paper)
        if out is None:
            typer.echo(text, nl=False)
        else:
            with _open(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
    if out is not None and chosen is not Format.html:
        _say(console, f"wrote {out}")
    if figures is not None and (out is not None or chosen in (Format.terminal, Format.html)):
        _say(console, f"wrote {sum(map(len, links.values()))} figures into {figures}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _open(path: Path) -> Iterator[Path]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _address(path: Path, start: Path) -> str:
    """The path of a figure as seen from the page, fit for a link."""
    relative = Path(os.path.relpath(path, start)).as_posix()
    return relative.replace("%", "%25").replace(" ", "%20").replace("(", "%28").replace(")", "%29")
