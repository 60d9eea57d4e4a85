"""Every format: parses, shows the numbers, marks the best, escapes what comes from files."""

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from petal.report import METRICS, domain_table, latex, load, markdown, metric_table, terminal, to_csv, to_json
from petal.report.formats import escape_latex, escape_markdown, latex_table, markdown_table
from petal.report.scores import Report
from petal.report.tables import Cell, Line, Table, _mark

from .fakes import DOMAINS, write_run
from .test_scores import by_hand

NASTY = r"a|b_c*d <i>&amp; 50% $x$ [bold] {\e} `q`"


@pytest.fixture(scope="module")
def report(run: Path) -> Report:
    return load(run)


@pytest.fixture
def nasty(tmp_path: Path) -> Report:
    run = write_run(tmp_path / "nasty", ("source", "bn"), batches=1, n=10, orders=(("o", ("fog", NASTY)),))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["jobs"][0]["label"] = NASTY
    manifest["command"] = NASTY
    (run / "manifest.json").write_text(json.dumps(manifest))
    return load(run)


def shown(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def markdown_rows(text: str, title: str) -> list[list[str]]:
    part = text.split(f"### {title}")[1].split("\n\n")[1]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()]


def test_domain_table_has_the_numbers(run: Path, report: Report) -> None:
    table = domain_table(report.sections[0], "error")
    assert table.columns == ("Gaussian", "shot", "fog", "jpeg", "Mean")
    line = next(line for line in table.lines if line.label == "CoTTA")
    for cell, domain in zip(line.cells[:-1], DOMAINS, strict=True):
        value = np.mean([by_hand(run, f"cotta-standard-15-{seed}", "error", domain) for seed in (0, 1, 2)])
        assert cell.text == f"{100 * value:.2f}"
        assert cell.after == ""
    means = [by_hand(run, f"cotta-standard-15-{seed}", "error") for seed in (0, 1, 2)]
    assert line.cells[-1].plain == f"{100 * np.mean(means):.2f} ({100 * np.std(means, ddof=1):.2f})"


def test_best_of_each_column(report: Report) -> None:
    for table in (domain_table(report.sections[0], "nll"), metric_table(report.sections[0])):
        for n, heading in enumerate(table.columns):
            if heading in ("ms per batch", "averaged over"):
                continue
            values = [float(line.cells[n].text) for line in table.lines]
            assert [line.cells[n].best for line in table.lines] == [value == min(values) for value in values]


def test_no_best_where_all_are_the_same_or_not_finite() -> None:
    texts = [["1.0", "1.0"], ["nan", "2.0"], ["nan", "2.0", "3.0", "–"]]
    columns = _mark([[Cell(text) for text in column] for column in texts])
    assert [[cell.best for cell in column] for column in columns] == [[False] * 2, [False] * 2, [False, True, False, False]]


def test_a_row_without_finished_jobs_shows_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source", "cotta"), batches=2, n=10, unfinished=("cotta-standard-15-0",))
    line = domain_table(load(run).sections[0]).lines[1]
    assert line.label == "CoTTA (unfinished)"
    assert {cell.text for cell in line.cells} == {"–"}


def test_everything_unfinished_still_reports(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=2, n=10, unfinished=("source-standard-15-0",))
    report = load(run)
    assert "No finished run yet." in shown(terminal(report), 100)
    assert "No finished run yet." in markdown(report)
    assert json.loads(to_json(report))["sections"][0]["rows"][0]["runs"] == 0
    assert len(list(csv.reader(io.StringIO(to_csv(report))))) == 5


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_terminal_fits_and_loses_nothing(report: Report, width: int) -> None:
    text = shown(terminal(report, ["error"], paper=True), width)
    assert max(map(len, text.splitlines())) <= width
    for line in domain_table(report.sections[0]).lines:
        for cell in line.cells:
            assert cell.text in text
    for row in report.sections[0].rows:
        assert row.label in text


def test_markdown_tables(report: Report) -> None:
    text = markdown(report, paper=True, figures={"cifar10": [("Error", "a caption", "fig/x.png")]})
    for name, how in METRICS.items():
        rows = markdown_rows(text, f"{escape_markdown(how.title)} by domain")
        table = domain_table(report.sections[0], name)
        assert rows[0] == ["Method", *table.columns]
        assert {len(row) for row in rows} == {len(table.columns) + 1}
        plain = [[cell.replace("**", "") for cell in row] for row in rows[2:]]
        assert plain == [[line.label, *(cell.plain for cell in line.cells)] for line in table.lines]
    assert "**" in text
    assert "![Error](fig/x.png)" in text
    assert "Comparison with the paper's Table 1" in text
    assert "## What was run" in text
    assert "ab" * 32 in text   # the hash of the data
    assert "Unfinished, and in no average: PETAL (FIM)" in text


def test_markdown_of_one_metric(report: Report) -> None:
    text = markdown(report, ["brier"])
    assert "### Brier by domain" in text
    assert "Error (%) by domain" not in text
    assert "paper's Table" not in text


def balanced(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\[{}\\]", "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    return depth == 0


def test_latex(report: Report) -> None:
    text = latex(report, ["error", "ece"], paper=True)
    assert balanced(text)
    begun, ended = re.findall(r"\\begin\{(\w+\*?)\}", text), re.findall(r"\\end\{(\w+\*?)\}", text)
    assert sorted(begun) == sorted(ended)
    assert begun.count("tabular") == 7
    for body in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        columns = len(body[0])
        rows = [line for line in body[1].splitlines() if line.endswith(r"\\")]
        assert len(rows) > 2
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {columns - 1}
    assert r"\toprule" in text
    assert re.search(r"\\textbf\{\d+\.\d\d\}", text)
    assert r"Error (\%)" in text
    set_lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert not any(re.search(r"(?<!\\)%.", line) for line in set_lines)   # no comment in the middle of a line


@pytest.mark.parametrize("text", [NASTY, "a & b", "~^#", "\\"])
def test_escapes(text: str) -> None:
    assert not re.search(r"(?<!\\)[&%$#_]", escape_latex(text))
    assert balanced(escape_latex(text))
    assert not re.search(r"(?<!\\)[|*_<\[`]", escape_markdown(text))
    table = Table("n", text, "Method", (text,), (Line(text, (Cell(text, text, best=True),)),))
    assert balanced(latex_table(table))
    assert {len(re.split(r"(?<!\\)\|", line)) for line in markdown_table(table).splitlines()} == {4}


def test_nasty_names_everywhere(nasty: Report) -> None:
    assert NASTY.split()[0] in shown(terminal(nasty), 300)
    assert "[bold]" in shown(terminal(nasty), 300)
    assert "<i>" not in re.sub(r"\\<", "", markdown(nasty))
    assert balanced(latex(nasty))
    rows = list(csv.DictReader(io.StringIO(to_csv(nasty))))
    assert rows[0]["method"] == NASTY
    assert NASTY in rows[0]
    assert json.loads(to_json(nasty))["sections"][0]["rows"][0]["label"] == NASTY


def test_csv_numbers(run: Path, report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(report, paper=True))))
    assert len(rows) == 8 * 4
    row = next(r for r in rows if r["method"] == "CoTTA" and r["metric"] == "Error (%)")
    values = [100 * by_hand(run, f"cotta-standard-15-{seed}", "error") for seed in (0, 1, 2)]
    assert float(row["mean"]) == pytest.approx(np.mean(values), rel=1e-7)
    assert float(row["std"]) == pytest.approx(np.std(values, ddof=1), rel=1e-6)
    assert float(row["difference"]) == pytest.approx(np.mean(values) - 16.29, abs=1e-6)
    assert (row["runs"], row["unfinished"], float(row["paper"])) == ("3", "0", 16.29)
    brier = next(r for r in rows if r["method"] == "PETAL (FIM)" and r["metric"] == "Brier")
    expected = np.mean([by_hand(run, f"petal-fim-standard-15-{seed}", "brier", "fog") for seed in (0, 1)])
    assert float(brier["fog"]) == pytest.approx(expected, rel=1e-7)
    assert (brier["runs"], brier["unfinished"], brier["paper"]) == ("2", "1", "")
    source = next(r for r in rows if r["method"] == "Source")
    assert source["std"] == ""


def test_json_numbers_are_fractions(run: Path, report: Report) -> None:
    data = json.loads(to_json(report, paper=True))
    section, = data["sections"]
    row = next(r for r in section["rows"] if r["label"] == "CoTTA")
    values = [by_hand(run, f"cotta-standard-15-{seed}", "error") for seed in (0, 1, 2)]
    expected = {"mean": np.mean(values), "std": np.std(values, ddof=1), "n": 3}
    assert row["mean"]["error"] == pytest.approx(expected)
    assert row["paper"]["error"]["difference"] == pytest.approx(np.mean(values) - 0.1629)
    assert section["domains"] == list(DOMAINS)
    assert data["runs"][0]["manifest"]["format"] == "petal-run-1"


def test_json_has_null_for_what_is_not_a_number(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=5)
    file = run / "jobs/source-standard-15-0/records.jsonl"
    lines = [json.loads(line) | {"nll": math.inf} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(to_json(load(run)))["sections"][0]["rows"][0]["mean"]["nll"]["mean"] is None
