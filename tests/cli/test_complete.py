"""Shell completion, as bash asks for it."""

import os

import pytest
import typer
from typer.testing import CliRunner

from petal.cli import app, complete
from petal.methods import METHODS
from petal.models import NETWORKS
from petal.recipes import RECIPES


def asked(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is offered for the last word."""
    parts = words.split(" ")
    env = {**os.environ, "_PETAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(parts) - 1)}
    result = CliRunner().invoke(app, [], prog_name="petal", env=env)
    assert result.exit_code == 0, result.output
    return result.output.split()


@pytest.mark.parametrize("command", ["run", "sweep", "tune", "fit --recipe", "serve --recipe"])
def test_recipes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(f"petal {command} cifar10", monkeypatch) == ["cifar10", "cifar10-gradual", "cifar100"]
    assert set(complete.recipes("")) == set(RECIPES)


@pytest.mark.parametrize(
    "command", ["run cifar10 -m", "sweep cifar10 --method", "tune digits -m", "apply -m", "serve -m", "check -m"]
)
def test_methods(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(f"petal {command} tent", monkeypatch) == ["tent", "tent-online"]
    assert asked(f"petal {command} eata+sm", monkeypatch) == ["eata+small"]
    assert set(METHODS) <= set(complete.methods(""))


@pytest.mark.parametrize("command", ["run cifar10 --network", "fit --network", "serve --network"])
def test_networks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(f"petal {command} small", monkeypatch) == ["small", "small-gn"]
    assert set(NETWORKS) <= set(complete.networks(""))


def test_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("petal re", monkeypatch) == ["report"]
    assert "--source" in asked("petal run --sou", monkeypatch)
    assert isinstance(typer.main.get_command(app), typer.core.TyperGroup)
