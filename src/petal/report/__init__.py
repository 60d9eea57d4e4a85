"""Tables and figures from run folders: the paper's tables in its form, its numbers beside ours, an HTML page.

    report = petal.report.load("runs/cifar10")
    print(petal.report.markdown(report, paper=True))
    petal.report.write_html(report, "report.html")

It needs the run folders, or files made of them (`to_summary`), and nothing else. `files` and `records` read and check
folders, `summaries` has what tables need of a run and its form as data, `rows` and `scores` sort jobs into rows and
average, `tables` and `compare` make the tables as values, `protocol` says how they were evaluated, `contents` in which
order they are read. `formats`, `figures` (with `curves`, `panels` and `drawing`) and `html` (with the templates in
`page/`) show them. `paper` has the published numbers.
"""

from petal.errors import renamed
from petal.report.compare import difference, pair_table, rank_table, verdict
from petal.report.contents import tables
from petal.report.drawing import FILE_TYPES, Drawing
from petal.report.figures import FIGURES, draw, write_figures
from petal.report.files import JobFolder, RunFolder, read_run
from petal.report.formats import latex, markdown, terminal, to_csv, to_json, to_summary
from petal.report.html import html, write_html
from petal.report.metric import METRICS, Stat
from petal.report.paper import PUBLISHED, Published, published
from petal.report.protocol import protocol_line
from petal.report.records import Records
from petal.report.rows import ResultRow
from petal.report.scores import Report, Section, load
from petal.report.summaries import Averages, Summary
from petal.report.tables import Table, cost_table, domain_table, metric_table, paper_tables, summary, visit_table

__all__ = [
    "FIGURES",
    "FILE_TYPES",
    "METRICS",
    "PUBLISHED",
    "Averages",
    "Drawing",
    "JobFolder",
    "Published",
    "Records",
    "Report",
    "ResultRow",
    "RunFolder",
    "Section",
    "Stat",
    "Summary",
    "Table",
    "cost_table",
    "difference",
    "domain_table",
    "draw",
    "html",
    "latex",
    "load",
    "markdown",
    "metric_table",
    "pair_table",
    "paper_tables",
    "protocol_line",
    "published",
    "rank_table",
    "read_run",
    "summary",
    "tables",
    "terminal",
    "to_csv",
    "to_json", "to_summary", "verdict",
    "visit_table",
    "write_figures",
    "write_html",
]  # fmt: skip

__getattr__ = renamed(__name__, Job=JobFolder, Row=ResultRow)
