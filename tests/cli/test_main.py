import json
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
