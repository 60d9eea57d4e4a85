import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import petal
from petal import cli
from petal.cli.methods import methods


def test_interrupted_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def wait() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", lambda: app([]))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "petal: interrupted" in capsys.readouterr().err


def test_a_rank_ends_without_the_end_of_python() -> None:
    """What is left of a process group's threads may abort a Python that is ending."""
    program = "import atexit; atexit.register(print, 'late'); from petal.cli import main; main()"
    for ranks, said in (("2", [f"petal {petal.__version__}"]), ("1", [f"petal {petal.__version__}", "late"])):
        end = subprocess.run(
            [sys.executable, "-c", program, "--version"], env={**os.environ, "WORLD_SIZE": ranks, "RANK": "0"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert end.stdout.splitlines() == said
        assert not end.stderr


def test_methods_are_listed_with_their_cards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("import petal\nclass Mine(petal.Petal): pass\npetal.METHODS['mine'] = Mine\n")
    try:
        methods(plugin=plugin, as_json=True)
    finally:
        petal.METHODS.pop("mine", None)
    cards = json.loads(capsys.readouterr().out)
    assert cards.pop("mine") is None        # what is said of PETAL is not said of what derives from it
    assert cards.keys() == petal.METHODS.keys() | {"...+asr", "...+reservoir"}
    assert cards["...+asr"]["title"] == "ASR"
    assert cards["petal"]["needs"] == ["posterior"]
    assert all(1950 < card["year"] < 2100 for card in cards.values())
    methods()
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in petal.METHODS)
