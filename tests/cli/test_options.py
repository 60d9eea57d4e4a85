import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from petal import PetalWarning
from petal._options import option
from petal.cli.attack import attack
from petal.cli.fit import fit
from petal.cli.options import options_of, shown_warnings
from petal.cli.run import run
from petal.cli.serve import serve
from petal.cli.sweep import sweep
from petal.cli.tune import tune
from petal.recipes import FitSettings
from petal.runs import ORDER, WAYS, Experiment
from petal.serve import Settings


def test_a_warning_is_shown_as_it_is() -> None:
    """A path may look like the markup of the terminal."""
    console = Console(record=True, width=80)
    with shown_warnings(console):
        warnings.simplefilter("always")
        warnings.warn("cannot write [/x] or [bold]", PetalWarning, stacklevel=1)
    assert console.export_text() == "warning: cannot write [/x] or [bold]\n"


@dataclass(frozen=True)
class Kitchen:
    """One field of each kind."""

    plates: int = option(3, "Plates per table.", "-p", low=1, high=9)
    heat: float | None = option(None, "Of the oven.")
    gas: bool = option(False, "Cook with gas.", panel="Fuel")
    cook: str = option("ann", "Who cooks.", choices=("ann", "bob"))
    menu: tuple[str, ...] = option((), "A dish; may be repeated.")
    size: tuple[int, ...] = option((3, 4), "Length and width.", text=True)
    book: Path | None = option(None, "Of recipes.", metavar="<path>")
    hidden: int = 7


GIVEN = ["-p", "5", "--heat", "2", "--gas", "--cook", "bob", "--menu", "soup", "--menu", "fish", "--size", "5,6",
         "--book", "b"]  # fmt: skip


def invoke(*arguments: str, **how: Any) -> tuple[dict[str, Any], Any]:
    got: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @options_of(Kitchen, **how)
    def cook(*, first: Annotated[int, typer.Option()] = 1, given: dict[str, Any], last: bool = False) -> None:
        """Cook."""
        got.update(given, first=first, last=last)

    return got, CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


def test_fields_become_options_of_their_kind() -> None:
    got, result = invoke()
    assert result.exit_code == 0, result.output
    assert got == {"plates": 3, "heat": None, "gas": False, "cook": "ann", "menu": [], "size": None, "book": None,
                   "first": 1, "last": False}  # fmt: skip
    got, result = invoke(*GIVEN, "--first", "2", "--last")
    assert result.exit_code == 0, result.output
    assert got == {"plates": 5, "heat": 2.0, "gas": True, "cook": "bob", "menu": ["soup", "fish"], "size": "5,6",
                   "book": Path("b"), "first": 2, "last": True}  # fmt: skip
    for wrong in (["--plates", "0"], ["--plates", "10"], ["--cook", "eve"], ["--hidden", "1"]):
        assert invoke(*wrong)[1].exit_code == 2


def test_what_is_not_given_is_none_where_it_is_laid_over_other_settings() -> None:
    got, _ = invoke(overlay="Default: {}.")
    assert {value for name, value in got.items() if name not in ("first", "last")} == {None}
    got, _ = invoke("--no-gas", "--plates", "3", overlay="Default: {}.")
    assert (got["gas"], got["plates"], got["cook"]) == (False, 3, None)
    shown = invoke("--help", overlay="Default: {}.")[1].output
    assert "Plates per table. Default: 3." in shown
    assert "Who cooks. Default: ann." in shown
    assert "Fuel" in shown
    assert shown.index("--first") < shown.index("--plates") < shown.index("--last")


def test_some_may_differ_from_recipe_to_recipe() -> None:
    got, result = invoke("--book", "a", "--book", "digits=b", each=("book",), leave_out=("cook",))
    assert result.exit_code == 0, result.output
    assert got["book"] == ["a", "digits=b"]
    assert "cook" not in got


@pytest.mark.parametrize(
    ("command", "kind", "without"),
    [(run, Experiment, ()), (sweep, Experiment, ()), (serve, Settings, ()), (fit, FitSettings, ()),
     *((command, Experiment, ("visits", "label_correlation", *ORDER, *WAYS)) for command in (tune, attack))],
)  # fmt: skip
def test_commands_have_the_options_and_the_help_of_a_dataclass(command: Any, kind: type, without: tuple[str, ...]) -> None:
    app = typer.Typer()
    app.command()(command)
    shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    for field in fields(kind):
        about = field.metadata.get("option")
        listed = f"--{field.name.replace('_', '-')} " in shown
        if about is None or field.name in without:
            assert not listed or field.name == "recipe" or field.name in ("classes",), field.name
        else:
            assert listed, field.name
            assert about.help.rstrip(".") in shown
