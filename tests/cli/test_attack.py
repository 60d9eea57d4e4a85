import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from petal import PetalError
from petal.cli.attack import attack
from recipes.source import make_source

app = typer.Typer()
app.command()(attack)


def test_a_table_and_records(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source"), tmp_path / "a.jsonl"
    arguments = ["digits", "--weights", source / "network.safetensors", "--images", 10, "--batch-size", 10, "-m", "bn",
                 "-m", "tent+robust", "--set", "robust.norm=clipped", "-a", "stripes", "--share", 0.2, "--share", 0.4,
                 "--clean", 2, "--out", out]  # fmt: skip
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(line["row"], line["attack"], line["share"]) for line in lines]
    names = [(row, name) for row in ("bn", "tent+robust") for name in ("none", "stripes")]
    assert found == [(*pair, share) for pair in names for share in (0.2, 0.4)]
    assert [record["n"] for record in lines[0]["records"]] == [8] * 15 + [10] * 2
    assert f"{100 * lines[2]['during']:.1f} ({100 * lines[2]['after']:.1f})" in result.output
    for wrong, text in ((("-a", "stripe"), "stripes"), (("--share", "0"), "above 0")):
        result = CliRunner().invoke(app, [*map(str, arguments), *wrong])
        assert isinstance(result.exception, PetalError)
        assert text in str(result.exception)
