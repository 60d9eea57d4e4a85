import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from petal import ConfigError
from petal.bench import cost, scale
from petal.cli.bench import app


def test_model_counts_the_slowest_rank() -> None:
    parts = scale.StepParts(views=5, rest=10.0, view=2.0, draw=0.5, exchange=1.0)
    expected = {1: 10 + 5 * 2, 2: 10 + 3 * 2 + 2 * 0.5 + 1, 3: 10 + 2 * 2 + 3 * 0.5 + 1, 5: 10 + 2 + 4 * 0.5 + 1}
    assert {n: parts.step(n) for n in expected} == expected
    rows = scale.table(parts, [1, 3], {3: 17.0})
    assert [(r.views_a_rank, r.speedup, r.measured) for r in rows] == [(5, 1.0, None), (2, 20 / 16.5, 17.0)]
    with pytest.raises(ConfigError, match="over 1 to 5 ranks, not 6"):
        scale.table(parts, [6])


def test_measure_starts_ranks_and_times_them() -> None:
    setting = scale.Setting(batch=4, views=3, batches=1)
    parts, measured = scale.measure(setting, [2], repeat=1)
    assert measured.keys() == {1, 2}
    assert min(*measured.values(), parts.view, parts.draw, parts.exchange) > 0
    assert parts.rest + 3 * parts.view == pytest.approx(max(measured[1], 3 * parts.view))
    with pytest.raises(ConfigError, match="leave out --busy"):
        scale.measure(scale.Setting(device="cuda", busy=True), [1])
    with pytest.raises(ConfigError, match="tent has no views"):
        scale.Setting(method="tent").adapter(torch.device("cpu"))


def test_command_takes_the_parts_of_a_file(tmp_path: Path) -> None:
    """30 ms a step, 20 of them for 4 views."""
    file, out = tmp_path / "steps.json", tmp_path / "scale.json"
    row = {"method": "petal", "network": "small", "batch": 200, "views": 4, "engine": "auto", "gate": "open", "ms": 30.0}
    rows = [{**row, "gate": "closed", "parts": {}}, {**row, "parts": {"views": 4.0, "teacher on views": 16.0}}]
    file.write_text(json.dumps({"bench": "steps", "command": "", "torch": "", "rows": rows}))
    given = ["--views", "4", "--exchange-ms", "1", "--draw-ms", "0.5", "--steps", str(file), "--json", str(out)]
    result = CliRunner().invoke(app, ["scale", *given, "--ranks", "1-2"])
    assert result.exit_code == 0, result.output
    assert [row["model"] for row in json.loads(out.read_text())["rows"]] == [30.0, 10 + 2 * 5 + 2 * 0.5 + 1]
    result = CliRunner().invoke(app, ["scale", *given, "--batch", "100"])
    assert isinstance(result.exception, ConfigError)
    assert "batch 100" in str(result.exception)


def test_cost_of_the_evaluation() -> None:
    """Batches and runs counted by hand from the paper; hours from milliseconds that make a run of Table 1 last one hour."""
    hour = 3.6e6 / 750
    wrn = cost.Figures(forward=hour, student=0, closed=0, opened=hour)
    resnet = cost.Figures(forward=hour, student=hour, closed=hour, opened=hour)
    rows = {c.recipe: c for c in cost.evaluation_cost({"wrn-28-10": wrn, "resnet-50": resnet})}
    batches = {name: row.batches for name, row in rows.items()}
    assert batches == {"cifar10": 15 * 50, "cifar10-gradual": 131 * 50, "cifar100": 750, "imagenet": 15 * 79,
                       "imagenet-3dcc": 12 * 79}  # fmt: skip
    assert {name: row.runs for name, row in rows.items()} == {
        "cifar10": 5 + 3 * 5, "cifar10-gradual": 80, "cifar100": 20, "imagenet": 80, "imagenet-3dcc": 80,
    }  # fmt: skip
    assert rows["cifar10"].least == pytest.approx(2)
    assert rows["cifar10"].most == pytest.approx(2 + 3 * 5)
    assert rows["cifar10-gradual"].most == pytest.approx((20 + 30) * 6550 / 750)
    assert rows["imagenet"].most == rows["imagenet"].least == pytest.approx(80 * 15 * 79 / 750)
    assert [row.measured for row in rows.values()] == [True, True, False, True, True]
    assert 0 < rows["cifar100"].most < rows["cifar10"].most
    guessed = {c.recipe: c for c in cost.evaluation_cost({"wrn-28-10": wrn})}["imagenet"]
    relative = 4.1e9 * 64 / (5.25e9 * 200)  # multiply-adds an image, times the batch
    assert guessed.most == pytest.approx((20 + 30) * 15 * 79 / 750 * relative, rel=0.03)
    with pytest.raises(ConfigError, match="figures of wrn-28-10"):
        cost.evaluation_cost({"resnet-50": resnet})


def test_cost_command(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    assert CliRunner().invoke(app, ["cost", "wrn-28-10=1,2,3,4", "--json", str(out)]).exit_code == 0
    assert json.loads(out.read_text())["rows"][0]["least"] == pytest.approx((2 * 1 + 3 * 2 + 15 * 3) * 750 / 3.6e6)
    for wrong in ("wrn-28-10=1,2", "wrn-28-10", "wrn-28-10=a,b,c,d"):
        assert isinstance(CliRunner().invoke(app, ["cost", wrong]).exception, ConfigError)
