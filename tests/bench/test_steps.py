"""`petal bench steps`: which combinations are measured."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import petal
from petal.bench.steps import run
from petal.cli.bench import app
from petal.methods import METHODS


@pytest.mark.parametrize("gates", [["open"], ["closed"], ["open", "closed"]], ids=str)
def test_without_views_there_is_no_gate_to_open(gates: list[str]) -> None:
    """K 0 is measured once, whatever the gates: a number that was asked for is never left out."""
    once = {"count": 1, "warmup": 1, "parts": False}
    rows = list(run(["petal"], ["eager"], ["small"], [2], [0, 1], gates, torch.device("cpu"), **once))  # type: ignore[arg-type]
    assert [(row.views, row.gate) for row in rows] == [(0, "closed"), *((1, gate) for gate in gates)]


def test_a_row_without_views_keeps_none() -> None:
    """The flagship has no views and no gate: it is measured as it is, whatever the views and gates of others."""
    once = {"count": 1, "warmup": 1, "parts": False}
    rows = list(run(["petal-f"], ["eager"], ["small"], [2], [32], ["open", "closed"], torch.device("cpu"), **once))  # type: ignore[arg-type]
    assert [(row.views, row.gate) for row in rows] == [(0, "none")]


def test_a_plugin_is_measured_like_a_method(tmp_path: Path) -> None:
    """One that takes a posterior, too."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import petal\n\nclass Mine(petal.Petal):\n    views = 0\n\n"
        'petal.METHODS["mine-timed"] = Mine\n'
    )
    out = tmp_path / "steps.json"
    options = ["--method", "mine-timed,tent", "--engine", "eager", "--batch", "4", "--views", "0", "--batches", "1"]
    try:
        result = CliRunner().invoke(app, ["steps", *options, "--warmup", "1", "--device", "cpu", "--plugin", str(plugin),
                                          "--json", str(out)])  # fmt: skip
    finally:
        METHODS.pop("mine-timed", None)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["mine-timed", "tent"]


def test_the_network_of_a_source_folder(tmp_path: Path) -> None:
    model = petal.models.build("small", 3, seed=0, width=8)
    petal.save_source(tmp_path / "s", model, "small", classes=3, options={"width": 8}, input=(3, 16, 16))
    arguments = ["steps", "--source", str(tmp_path / "s"), "--method", "bn", "--engine", "eager", "--batch", "2",
                 "--batches", "1", "--warmup", "1", "--no-parts", "--device", "cpu",
                 "--json", str(tmp_path / "rows.json")]  # fmt: skip
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["network"] == "small"
    assert row["tflop"] == pytest.approx(petal.models.flops(model, (3, 16, 16)) * 2 / 1e12)
