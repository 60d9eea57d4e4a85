from pathlib import Path

import pytest
from typer.testing import CliRunner

from petal.cli import app
from petal.runs import PROTOCOLS, read_manifest
from recipes.source import make_source


def test_the_list_has_every_protocol() -> None:
    made = CliRunner().invoke(app, ["protocols"], env={"COLUMNS": "200"})
    assert made.exit_code == 0
    assert all(name in made.output for name in PROTOCOLS)


def test_a_run_by_a_protocol_and_a_contradiction(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = make_source(tmp_path / "source")
    command = ["run", "digits", "--protocol", "batch-64-4", "-m", "source", "--out", str(tmp_path / "run"), "-q",
               "--weights", str(source / "network.safetensors")]  # fmt: skip
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["protocol"], manifest["images"], manifest["batch_size"]) == ("batch-64-4", 4, 64)
    with pytest.raises(Exception, match="contradicts --images 5"):
        CliRunner().invoke(app, [*command, "--images", "5"], catch_exceptions=False)
    with pytest.raises(Exception, match="contradicts --order 2"):
        CliRunner().invoke(app, [*command, "--order", "2"], catch_exceptions=False)
