from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import petal.recipes.published as published
from petal.cli.demo import demo
from recipes.source import make_source

app = typer.Typer()
app.command()(demo)


def test_demo_shows_table_1_and_writes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is, on few images and a source network that is there already."""
    make_source(tmp_path / "source")
    quick = replace(published.digits(), views=2)
    monkeypatch.setitem(published.RECIPES, "digits", lambda: quick)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--images", "16"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + str(result.exception)
    labels = "Source,BN Adapt,Pseudo-label,TENT-online,TENT-continual,CoTTA,PETAL (S-Res),PETAL (FIM)"
    assert all(label in result.output for label in labels.split(","))
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
