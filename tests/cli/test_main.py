import pytest
import typer

from petal import cli


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
