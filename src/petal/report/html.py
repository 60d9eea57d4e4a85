"""The whole report as one HTML file: no network, no scripts, legible on a phone, a laptop and paper.

The markup is the template `page/page.html`, the style `page/page.css`; this module gives them their values.
"""

from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from petal._files import replacing
from petal._version import __version__
from petal.errors import DataError
from petal.report.compare import rank_table, verdict
from petal.report.contents import details, first, rest
from petal.report.figures import draw
from petal.report.metric import METRICS
from petal.report.scores import Report, load
from petal.report.tables import options_table, run_tables

_PAGE = Environment(
    loader=PackageLoader("petal.report", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_PAGE.globals |= {"verdict": verdict, "first": first, "rest": rest, "details": details, "draw": draw,
                  "options_table": options_table, "run_tables": run_tables, "rank_table": rank_table,
                  "version": __version__}  # fmt: skip


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
    """The page as text. Everything that comes from files is escaped by the template."""
    links = [(f"s{n}", section.title) for n, section in enumerate(report.sections, 1)]
    links += [("domains", "By domain"), ("run", "What was run")]
    if len(report.sections) == 1:
        links = [("s1", "Results"), ("s1-rest", "Details"), ("domains", "By domain"), ("run", "What was run")]
    values = {"report": report, "title": title or report.title, "subtitle": _subtitle(report), "links": links}
    return _PAGE.get_template("page.html").render(values, metrics=tuple(metrics), paper=paper)


def _subtitle(report: Report) -> str:
    rows = [row for section in report.sections for row in section.rows]
    runs = sum(len(row.jobs) + len(row.unfinished) for row in rows)
    finished = sum(row.count for row in rows)
    images = sum(row.count * row.images for row in rows)
    created = sorted(str(folder.manifest["created"]) for folder in report.folders if folder.manifest.get("created"))
    made = [created[0][:16].replace("T", " ")] if created else []
    known = [folder.manifest.get("device_name") or folder.manifest.get("device") for folder in report.folders]
    devices = dict.fromkeys(str(name) for name in known if name)
    parts = [f"{len(rows)} methods", f"{finished} of {runs} runs finished", f"{images:,} predictions"]
    return " · ".join([*parts, *devices, *made])
