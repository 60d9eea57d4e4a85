"""`petal sweep --source`: a folder for all recipes, or one for each."""

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import petal
from petal import ConfigError, models
from petal.cli.sweep import sweep


def test_a_folder_for_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for classes in (10, 100):
        model = models.build("small", classes, seed=0, width=8)
        petal.save_source(tmp_path / f"s{classes}", model, "small", classes=classes, options={"width": 8})
    found: list[object] = []
    monkeypatch.setattr(sys.modules["petal.cli.sweep"], "what_is_left", lambda folder, parts: found.extend(parts))
    app = typer.Typer()
    app.command()(sweep)
    common = ["-m", "bn", "--out", str(tmp_path / "out")]
    given = ["--source", str(tmp_path / "s10"), "--source", f"cifar100={tmp_path / 's100'}"]
    result = CliRunner().invoke(app, ["cifar10", "cifar100", "digits", *given, *common])
    assert "All 3 runs are done" in result.output, result.exception
    weights = {part.experiment.recipe: Path(part.experiment.weights).parent.name for part in found}
    assert weights == {"cifar10": "s10", "cifar100": "s100", "digits": "s10"}
    for wrong, words in ((["--weights", "w"], "leave one of them out"), (["cifar100"], "10 classes, and 100 are asked for")):
        result = CliRunner().invoke(app, ["cifar10", *given[:2], *common, *wrong])
        assert isinstance(result.exception, ConfigError)
        assert words in str(result.exception)
