"""`petal check`: does a method keep the promises of every method?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from petal.checks import ENGINES, NETWORKS, Check, CheckFailed, Factory, NotApplicable, check_method
from petal.cli import complete
from petal.cli.codes import PARTLY
from petal.cli.common import make_console
from petal.cli.options import bar
from petal.errors import ConfigError
from petal.methods import METHODS
from petal.recipes import WRAPPERS, load_plugin
from petal.recipes.names import unknown

SHOWN = {"ok": "[green]ok[/]    ", "failed": "[bold red]failed[/]", "-": "[dim]-[/]     ", "": "      "}


def check(
    plugin: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A Python file that adds methods to petal.METHODS.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", autocompletion=complete.methods,
                                       help="A method, also with something around it: mine+small+guard; may be repeated. "
                                       "Default: those of the file.")
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(NETWORKS)}; may be repeated. Default: all.")
    ] = None,
) -> None:
    """Check a method on three tiny networks, by plain code and by the engine; exit code 1 if it fails.

    Each check is told with what to do about it. One that has no meaning for a method is left out (-).
    """
    added = {} if plugin is None else load_plugin(plugin)
    names = method or added.get("methods", "").split(", ")
    if not names[0]:
        told = f"; {plugin} adds networks only" if added else ""
        raise ConfigError(f"say what to check: a file that adds a method, or a method of petal's own (--method tent){told}")
    for name in network or ():
        if name not in NETWORKS:
            raise unknown("network", name, NETWORKS)
    console, failed = make_console(), 0
    for name in names:
        failed += _checked(name, _factory(name), network or list(NETWORKS), console)
    if failed:
        raise typer.Exit(PARTLY)


def _factory(name: str) -> Factory:
    """Makes adapters of a method, by its name with what goes around it."""
    core, *around = name.split("+")
    if core not in METHODS:
        raise unknown("method", core, METHODS)
    for wrapper in around:
        if wrapper not in WRAPPERS:
            raise unknown("wrapper", wrapper, WRAPPERS)
    return Factory(METHODS[core], [WRAPPERS[wrapper] for wrapper in around])


def _checked(name: str, factory: Factory, networks: list[str], console: Console) -> int:
    """Run all checks of a method and print what came of them; how many failed."""
    checks = list(check_method(factory, networks))
    cells: dict[str, dict[tuple[str, str], str]] = {}
    said: dict[str, list[Check]] = {}
    with bar(console) as progress:
        task = progress.add_task(name, total=len(checks))
        for one in checks:
            progress.update(task, description=f"{name}: {one}")
            outcome = "ok"
            try:
                one()
            except NotApplicable:
                outcome = "-"
            except CheckFailed as error:
                outcome = "failed"
                said.setdefault(f"{one.name}: {error}", []).append(one)
            cells.setdefault(one.name, {})[one.network, one.engine] = outcome
            progress.advance(task)
    table = Table(box=None, pad_edge=False, title=f"{name}, by plain code and by the engine", title_justify="left")
    for heading in ("check", *networks):
        table.add_column(heading, no_wrap=True)
    for row, found in cells.items():
        by_network = ([SHOWN[found.get((network, engine), "")] for engine in ENGINES] for network in networks)
        table.add_row(row, *map(" ".join, by_network))
    console.print(table)
    for text, where in said.items():
        places = "; ".join(f"{one.network}, {one.engine}" for one in where)
        console.print(f"\n[bold red]failed[/] [bold]{escape(text)}[/]", highlight=False)
        console.print(f"[dim]{where[0].description} ({places})[/]", highlight=False)
    failed = sum(map(len, said.values()))
    passed = f"{len(checks) - failed} of {len(checks)} checks passed or have no meaning here"
    console.print(f"\n{name}: {passed}", highlight=False)
    return failed
