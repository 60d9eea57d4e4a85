"""Differences over pairs of runs against SciPy's paired test, ranks, and the order of a report's tables."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import petal
from petal.report import difference, draw, load, markdown, pair_table, rank_table, tables

from .fakes import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("compare") / "run", ("source", "cotta", "petal-fim"), seeds=(0, 1, 2))


def errors(section: petal.report.Section, name: str, metric: str = "error") -> list[float]:
    row = next(row for row in section.rows if row.id == name)
    jobs = sorted(row.jobs, key=lambda job: job.seed)
    return [getattr(job.records.scores(), metric) for job in jobs]


@pytest.mark.parametrize("metric", ["error", "nll", "ece"])
def test_differences_are_those_of_a_paired_test(runs: Path, metric: str) -> None:
    (section,) = load(runs).sections
    rows = {row.id: row for row in section.rows}
    found = difference(rows["cotta"], rows["petal-fim"], metric)
    test = stats.ttest_rel(errors(section, "cotta", metric), errors(section, "petal-fim", metric))
    interval = test.confidence_interval(0.95)
    assert found.n == 3
    expected = np.mean(errors(section, "cotta", metric)) - np.mean(errors(section, "petal-fim", metric))
    assert (found.mean, found.low, found.high) == pytest.approx((expected, interval.low, interval.high))


def test_a_row_with_one_seed_is_paired_with_every_seed(runs: Path) -> None:
    (section,) = load(runs).sections
    rows = {row.id: row for row in section.rows}
    assert len(rows["source"].jobs) == 1
    found = difference(rows["source"], rows["petal-fim"], "error")
    assert found.n == 3
    assert found.mean == pytest.approx(errors(section, "source")[0] - np.mean(errors(section, "petal-fim")))


def test_the_table_names_whom_it_compares_with(runs: Path) -> None:
    best, chosen = (load(runs, against=name).sections[0] for name in (None, "cotta"))
    assert [line.label for line in pair_table(best).lines] == ["Source", "CoTTA"]
    assert "PETAL (FIM)" in pair_table(best).title
    assert [line.label for line in pair_table(chosen).lines] == ["Source", "PETAL (FIM)"]
    cell = pair_table(chosen).lines[1].cells[0]
    value = 100 * (np.mean(errors(chosen, "petal-fim")) - np.mean(errors(chosen, "cotta")))
    assert cell.text == f"{value:+.2f}".replace("-", "−")
    assert cell.after.startswith("[−")
    with pytest.raises(petal.DataError, match=r"no finished row 'nobody'.*source, cotta, petal-fim"):
        load(runs, against="nobody")


def test_one_run_has_no_interval(tmp_path: Path) -> None:
    (section,) = load(write_run(tmp_path / "run", ("source", "petal-fim"))).sections
    (line,) = pair_table(section).lines
    assert line.cells[0].after == ""
    assert line.cells[-1].text == "1"


def test_ranks_over_streams(tmp_path: Path) -> None:
    names = ("source", "bn", "petal-fim")
    paths = [write_run(tmp_path / str(n), names, n=20 + 20 * n, manifest={"severity": n}) for n in (1, 2)]
    assert rank_table(load(paths[0])) is None
    report = load(*paths)
    assert len(report.sections) == 2
    found = rank_table(report)
    rows = [{row.id: row for row in section.rows} for section in report.sections]
    scores = np.array([[by_name[name].stat("error").mean for by_name in rows] for name in names])
    expected = np.array([stats.rankdata(column) for column in scores.T]).T
    order = np.argsort(expected.mean(1), kind="stable")
    assert [line.label for line in found.lines] == [rows[0][names[n]].label for n in order]
    assert [[float(c.text) for c in line.cells] for line in found.lines] == [
        [*expected[n], pytest.approx(expected[n].mean(), abs=0.005)] for n in order
    ]
    assert "Ranks by error" in markdown(report)


def test_scores_come_first_and_the_long_tables_last(runs: Path) -> None:
    (section,) = load(runs).sections
    names = [table.name.removeprefix(f"{section.slug}-") for table in tables(section)]
    assert names == ["metrics", "pairs", "cost", "error"]


def test_the_front_is_of_rows_that_none_beats(runs: Path) -> None:
    (section,) = load(runs).sections
    (figure,) = [drawing for drawing in draw(section) if drawing.name == "cost"]
    named = figure.caption.partition(": ")[2].rstrip(".").split(", ")
    points = {row.label: (row.seconds, row.stat("error").mean) for row in section.rows}
    beaten = {a for a, (t, e) in points.items() if any(u <= t and f <= e and (u, f) != (t, e) for u, f in points.values())}
    assert set(named) == points.keys() - beaten
