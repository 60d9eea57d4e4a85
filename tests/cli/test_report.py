"""`petal report`: formats, files, and what it refuses."""

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from petal.cli.report import report
from petal.errors import ConfigError, DataError
from report.fakes import DOMAINS, write_run

app = typer.Typer()
app.command()(report)


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ("source", "cotta", "petal-fim")
    orders = (("1", DOMAINS[:2]),)
    return write_run(tmp_path_factory.mktemp("cli") / "run", rows, seeds=(0, 1), batches=2, n=20, orders=orders)


def test_terminal(folder: Path) -> None:
    result = call(folder)
    assert result.exit_code == 0, result.output
    assert "Error (%) by domain" in result.output
    assert "PETAL (FIM)" in result.output
    assert "paper's" not in result.output
    assert "Comparison with the paper's Table 1" in call(folder, "--paper").output


def test_formats_to_standard_output(folder: Path) -> None:
    assert call(folder, "--format", "markdown").output.startswith("# Lifelong test-time adaptation")
    assert r"\begin{tabular}" in call(folder, "-f", "latex").output
    assert len(list(csv.DictReader(call(folder, "-f", "csv", "--metric", "nll").output.splitlines()))) == 3
    data = json.loads(call(folder, "--format", "json", "--title", "T", "--note", "a_b", "--note", "c").output)
    assert (data["title"], data["notes"]) == ("T", ["a_b", "c"])
    assert r"a\_b" in call(folder, "--format", "markdown", "--note", "a_b").output
    assert "a_b" in call(folder, "--note", "a_b").output


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.md", "# "), ("r.tex", "%"), ("r.csv", "benchmark,"), ("r.json", "{"), ("r.txt", "All scores")],
)
def test_the_name_of_the_file_says_the_format(folder: Path, tmp_path: Path, name: str, start: str) -> None:
    result = call(folder, "--out", tmp_path / "new" / name)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / name).read_text(encoding="utf-8").startswith(start)
    assert f"wrote {tmp_path / 'new' / name}" in result.output.replace("\n", "")


def test_metric(folder: Path) -> None:
    output = call(folder, "--metric", "brier").output
    assert "Brier by domain" in output
    assert "Error (%) by domain" not in output
    assert call(folder, "--metric", "accuracy").exit_code == 2


def test_markdown_links_the_figures_from_where_it_lies(folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    result = call(folder, "--paper", "--out", docs / "results.md", "--figures", docs / "images (1)", "--figure-type", "svg")
    assert result.exit_code == 0, result.output
    page = (docs / "results.md").read_text(encoding="utf-8")
    assert "](images%20%281%29/cifar10-stream.svg)" in page
    assert (docs / "images (1)" / "cifar10-stream.svg").stat().st_size > 10_000
    assert "wrote 6 figures" in result.output


def test_html_goes_into_the_run_folder(folder: Path) -> None:
    result = call(folder, "--format", "html")
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (folder / "report.html").unlink()


def test_refusals(folder: Path, tmp_path: Path) -> None:
    assert isinstance(call(tmp_path).exception, DataError)
    assert isinstance(call(folder, "--out", tmp_path / "report.xyz").exception, ConfigError)
    (tmp_path / "file").write_text("")
    assert isinstance(call(folder, "--out", tmp_path / "file" / "r.md").exception, DataError)
    assert call().exit_code == 2
