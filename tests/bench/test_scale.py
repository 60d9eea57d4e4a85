import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from petal import ConfigError
from petal.bench import cost, scale
from petal.cli.bench import app


def test_model_counts_the_slowest_rank() -> None:
    parts = scale.Parts(views=5, rest=10.0, view=2.0, draw=0.5, exchange=1.0)
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


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    given = ["--views", "4", "--rest-ms", "10", "--view-ms", "5", "--exchange-ms", "1", "--draw-ms", "0.5"]
    result = CliRunner().invoke(app, ["scale", *given, "--ranks", "1-2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == [30.0, 22.0]
    result = CliRunner().invoke(app, ["scale", "--rest-ms", "10"])
    assert isinstance(result.exception, ConfigError)


def test_cost_of_the_evaluation() -> None:
    """Batches and runs counted by hand from the paper; hours from milliseconds that make a run of Table 1 last one hour."""
    hour = 3.6e6 / 750
    rows = {c.recipe: c for c in cost.evaluation_cost(cost.Figures(forward=hour, student=0, closed=0, opened=hour))}
    batches = {name: row.batches for name, row in rows.items()}
    assert batches == {"cifar10": 15 * 50, "cifar10-gradual": 131 * 50, "cifar100": 750, "imagenet": 15 * 79,
                       "imagenet-3dcc": 12 * 79}  # fmt: skip
    assert {name: row.runs for name, row in rows.items()} == {
        "cifar10": 5 + 3 * 5, "cifar10-gradual": 80, "cifar100": 20, "imagenet": 80, "imagenet-3dcc": 80,
    }  # fmt: skip
    assert rows["cifar10"].least == pytest.approx(2)
    assert rows["cifar10"].most == pytest.approx(2 + 3 * 5)
    assert rows["cifar10-gradual"].most == pytest.approx((20 + 30) * 6550 / 750)
    assert rows["imagenet"].relative == pytest.approx(4.1e9 * 64 / (5.25e9 * 200), rel=0.03)   # multiply-adds an image
