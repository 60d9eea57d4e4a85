"""Which tables a report has, in the order in which they are read; each says by which protocol its runs were made."""

from collections.abc import Iterable
from dataclasses import replace

from petal.report.compare import pair_table
from petal.report.scores import Section
from petal.report.tables import Table, comparison, cost_table, domain_table, metric_table, published_tables, visit_table


def tables(section: Section, metrics: Iterable[str] = ("error",), paper: bool = False) -> list[Table]:
    """All tables of a section: the one to read first, the rest, and those by domain."""
    metrics = tuple(metrics)
    return [first(section), *rest(section, metrics, paper), *details(section, metrics, paper)]


def first(section: Section) -> Table:
    """All scores and the time of a batch: the table to read if one reads one."""
    return _said(section, metric_table(section))


def rest(section: Section, metrics: Iterable[str] = ("error",), paper: bool = False) -> list[Table]:
    """Who differs by how much, scores by visit, the paper's scores if asked for, and the cost."""
    found = [pair_table(section), *([comparison(section)] if paper else [])]
    found += [visit_table(section, metric) for metric in metrics if section.visits > 1]
    return [_said(section, table) for table in [*found, cost_table(section)] if table is not None]


def details(section: Section, metrics: Iterable[str] = ("error",), paper: bool = False) -> list[Table]:
    """The long tables: each score by domain, and the paper's own table by corruption if asked for."""
    found = [domain_table(section, metric) for metric in metrics]
    return [*(_said(section, table) for table in found), *(published_tables(section) if paper else [])]


def _said(section: Section, table: Table) -> Table:
    return replace(table, notes=(*table.notes, section.protocol))
