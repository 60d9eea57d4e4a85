"""Exit codes: what docs/reference/commands.md says is what the commands do."""

import re
import sys
from pathlib import Path

import pytest
import typer

from petal import ConfigError, ParallelError, cli
from petal.cli.codes import DONE, INTERRUPTED, LOST, PARTLY, REFUSED
from petal.cli.launch import launch
from petal.cli.sweep import SomeFailed

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")


def code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["petal", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def table(first: str) -> list[list[str]]:
    """The rows of a table of the page by the first word of its header."""
    found = re.search(rf"^\| {first} \|.*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in found[0].splitlines()]


def test_the_page_has_every_command_and_every_code() -> None:
    assert [row[0] for row in table("code")[2:]] == [str(n) for n in (DONE, PARTLY, REFUSED, LOST, INTERRUPTED)]
    rows = {row[0]: row[1:] for row in table("command")[2:]}
    commands = set(typer.main.get_command(cli.app).commands)
    assert rows.keys() == commands
    assert {name for name, row in rows.items() if row[1]} == {"apply", "check", "doctor", "sweep"}
    assert {name for name, row in rows.items() if row[3]} == {"run"}


@pytest.mark.parametrize("arguments", [
    ("run",), ("run", "cifar11"), ("nothing",), ("report", "nowhere"), ("runs", "nowhere"), ("sweep", "cifar11"), ("fit",),
    ("apply", "small", "--out", "a.csv"), ("check",), ("corrupt", "nowhere", "out"), ("tune", "cifar11"),
    ("bench", "cost", "x"),
    ("methods", "--plugin", "nowhere.py"), ("demo", "--severity", "9"), ("serve", "--demo", "--source", "x"),
])  # fmt: skip
def test_mistakes_are_2(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert code(monkeypatch, *arguments) == REFUSED
    assert list(tmp_path.iterdir()) == []


def test_done_is_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for arguments in (("--version",), ("methods", "--json"), ("runs", str(tmp_path)), ("run", "--help")):
        assert code(monkeypatch, *arguments) == DONE


def test_failed_checks_are_1(monkeypatch: pytest.MonkeyPatch) -> None:
    check_module = sys.modules["petal.cli.check"]
    monkeypatch.setattr(check_module, "_checked", lambda *arguments: 1)
    assert code(monkeypatch, "check", "-m", "tent") == PARTLY
    monkeypatch.setattr(check_module, "_checked", lambda *arguments: 0)
    assert code(monkeypatch, "check", "-m", "tent") == DONE


@pytest.mark.parametrize(
    ("error", "expected"),
    [(SomeFailed("1 of 2 runs failed"), PARTLY), (ParallelError("rank 1 is gone"), LOST), (ConfigError("no"), REFUSED),
     (KeyboardInterrupt(), INTERRUPTED)],
)  # fmt: skip
def test_errors_and_their_codes(error: BaseException, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", lambda: app([]))
    assert code(monkeypatch) == expected


@pytest.mark.parametrize(
    ("codes", "kind"), [({0: 2, 1: -15}, ConfigError), ({1: -9, 0: 3}, ParallelError), ({0: 3}, ParallelError)]
)
def test_the_launcher_tells_mistakes_from_lost_ranks(
    codes: dict[int, int], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    failures = {rank: ProcessFailure(rank, 0, code, "/dev/null") for rank, code in codes.items()}

    def failing(*arguments: object) -> None:
        raise ChildFailedError("petal", failures)

    monkeypatch.setattr(api, "elastic_launch", lambda config, entry: failing)
    with pytest.raises(kind, match=r"rank \d of 2"):
        launch(2, torch.device("cpu"))
