import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from petal import (
    DiagonalGaussian,
    LowRankGaussian,
    PetalError,
    SourceStatistics,
    load_posterior,
    load_source,
    models,
    open_dataset,
)
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
    assert about["weights"]["path"] == weights.name          # the folder knows no path of this machine
    source = load_source(more)
    assert (source.config.network, source.config.classes, source.config.input) == ("small", 10, (3, 32, 32))
    assert source.config.options == {"width": 8}
    assert isinstance(source.posterior, LowRankGaussian)
    assert source.statistics is not None
    assert str(tmp_path) not in "".join(p.read_text() for p in more.glob("*.json"))
    assert "Error on clean test images" in (more / "README.md").read_text()
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
        (["--recipe", "digits", "--plugin", "nowhere.py"], "no plugin at"),
        (["--recipe", "digits", "--class-names", "nowhere.txt"], "cannot be read as names"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(PetalError, match=words):
        call(*arguments, "--out", tmp_path / "x")


def test_names_of_classes_and_a_network_of_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from functools import partial\nimport petal\n"
        "petal.models.NETWORKS['thin'] = partial(petal.models.SmallNet, width=8)\n"
    )
    (tmp_path / "names.txt").write_text("zero\none\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n")
    given = ["--network", "thin", "--data", "digits", "--epochs", 1, "--swag-epochs", 1, "--swag-batch-size", 250,
             "--plugin", tmp_path / "net.py"]  # fmt: skip
    try:
        out = call(*given, "--class-names", tmp_path / "names.txt", "--out", tmp_path / "s", "--batch-size", 250)
        assert f"--source {tmp_path / 's'}" in out
        source = load_source(tmp_path / "s")
        assert (source.config.network, source.config.class_names[3]) == ("thin", "three")
    finally:
        models.NETWORKS.pop("thin", None)
    with pytest.raises(PetalError, match="there is no network 'thin'"):
        load_source(tmp_path / "s")
