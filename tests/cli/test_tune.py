import json
from pathlib import Path

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
    assert f"petal.prior_weight={content['best']['prior_weight']:g}" in result.output
    result = CliRunner().invoke(app, [*map(str, arguments), "--corruption", "fog"])
    assert isinstance(result.exception, PetalError)
    assert "never on the test" in str(result.exception)
