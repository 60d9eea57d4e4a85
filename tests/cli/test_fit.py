import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from petal import DiagonalGaussian, LowRankGaussian, PetalError, SourceStatistics, load_posterior, models, open_dataset
from petal.cli.fit import fit
from petal.recipes.provenance import file_hash

app = typer.Typer()
app.command()(fit)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_from_scratch_then_from_weights(tmp_path: Path) -> None:
    out = call("--recipe", "digits", "--epochs", 2, "--swag-epochs", 1, "--out", tmp_path)
    assert "clean test error" in out
    model = models.build("small", 10, tmp_path / "network.safetensors", width=8)
    DiagonalGaussian.load(tmp_path / "posterior.safetensors").check(model)
    more = tmp_path / "more"
    weights = tmp_path / "network.safetensors"
    out = call("--recipe", "digits", "--weights", weights, "--swag-epochs", 1, "--swag-snapshots", 4, "--out", more,
               "--swag-rank", 3, "--collect", "prototypes,fisher")  # fmt: skip
    q = load_posterior(more / "posterior.safetensors")
    assert isinstance(q, LowRankGaussian)
    assert q.confidence is not None
    assert all(len(factor) == 3 for factor in q.factors.values())
    statistics = SourceStatistics.load(more / "statistics.safetensors")
    statistics.check(model, "prototypes", "fisher")
    assert int(statistics.counts.sum()) == len(open_dataset("digits:train"))
    assert "trained" not in out
    assert str(more / "statistics.safetensors") in out.replace("\n", "")
    about = json.loads((more / "fit.json").read_text())
    assert about["statistics"]["sha256"] == file_hash(more / "statistics.safetensors")
    assert not (tmp_path / "statistics.safetensors").exists()
    assert about["weights"]["path"] == str(weights)
    assert about["settings"]["swag_snapshots"] == 4
    assert about["settings"]["epochs"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to fit"),
        (["--network", "small"], "--data"),
        (["--recipe", "cifar11"], "did you mean"),
        (["--recipe", "cifar10"], "--data"),
        (["--recipe", "digits", "--collect", "prototypes,mean"], "collect must be one of"),
        (["--network", "smal", "--data", "digits"], "did you mean small"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(PetalError, match=words):
        call(*arguments, "--out", tmp_path / "x")
