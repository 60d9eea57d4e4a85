"""Which tables a report has, in the order in which they are read."""

from collections.abc import Iterable

from petal.report.compare import pair_table
from petal.report.scores import Section
from petal.report.tables import Table, cost_table, domain_table, metric_table, paper_tables, visit_table


def tables(section: Section, metrics: Iterable[str] = ("error",), paper: bool = False) -> list[Table]:
    """The tables of a section: all scores and who differs by how much, by visit and domain for each metric, the paper's if
    asked for, and the cost.
    """
    metrics, pairs = tuple(metrics), pair_table(section)
    found = [metric_table(section), *([pairs] if pairs else [])]
    found += [visit_table(section, metric) for metric in metrics if section.visits > 1]
    found += [domain_table(section, metric) for metric in metrics]
    if paper:
        found += paper_tables(section)
    return [*found, cost_table(section)]
