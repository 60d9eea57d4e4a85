import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from petal import PetalError
from petal.cli.tune import tune
from recipes.source import make_source

app = typer.Typer()
app.command()(tune)


def test_writes_the_trials_and_names_the_best(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    arguments = ["digits", "--weights", source / "network.safetensors", "--posterior", source / "posterior.safetensors",
                 "--images", 16, "--batch-size", 8, "--alpha", 1e-6, "--alpha", 1e-9, "--delta", 0.03, "--out",
                 tmp_path / "t.json"]  # fmt: skip
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "t.json").read_text())
    assert len(content["trials"]) == 2
    assert content["corruptions"] == ["speckle_noise", "gaussian_blur", "spatter", "saturate"]
    best = content["best"]["options"]
    assert f"--set 'petal.prior_weight={best['prior_weight']}' --set 'petal.restore=Fisher(quantile=0.03)'" in result.output
    result = CliRunner().invoke(app, [*map(str, arguments), "--corruption", "fog"])
    assert isinstance(result.exception, PetalError)
    assert "never on the test" in str(result.exception)


def tuned(source: Path, out: Path, *options: str) -> dict[str, Any]:
    arguments = ["digits", "--weights", str(source / "network.safetensors"), "--images", "16", "--batch-size", "8",
                 "--corruption", "spatter", "--out", str(out), *options]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_any_setting_of_any_row(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source"), tmp_path / "t.json"
    content = tuned(source, out, "-m", "tent+small", "--try", "lr=1e-3,10.0", "--try", "small.memory=4,6,8", "--try",
                    "optimizer=SGD(momentum=0.9, nesterov=True),none")  # fmt: skip
    tried = [trial["options"] for trial in content["trials"]]
    assert content["row"] == "tent+small"
    assert len(tried) == 2 + (3 - 1) + (2 - 1)          # an option begins with a value that was tried with those before
    assert {o["lr"] for o in tried} == {1e-3, 10.0}
    assert {o["small.memory"] for o in tried} == {4, 6, 8}
    assert {o["optimizer"] for o in tried} == {"SGD(momentum=0.9, nesterov=True)", None}


def test_a_budget_ends_it(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source"), tmp_path / "t.json"
    content = tuned(source, out, "-m", "tent", "--try", "lr=1e-3,1e-2,1e-1", "--budget", "2")
    assert sorted(t["options"]["lr"] for t in content["trials"]) == [1e-3, 1e-2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-m", "tent"], "--try lr="),
        (["-m", "tent", "--try", "lr"], "OPTION=VALUE"),
        (["-m", "tent", "--try", "rate=1"], "rate"),
        (["-m", "tent", "--try", "lr=fast"], "fast"),
        (["-m", "tent", "--try", "small.memory=4"], "small"),
        (["-m", "tent", "--alpha", "1e-6"], "PETAL"),
    ],
)
def test_what_cannot_be_tried_is_named(tmp_path: Path, options: list[str], says: str) -> None:
    with pytest.raises(PetalError, match=says):
        tuned(make_source(tmp_path / "source"), tmp_path / "t.json", *options)
    assert not (tmp_path / "t.json").exists()
