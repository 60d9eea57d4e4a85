"""The command `petal`: the only layer that prints, picks devices and seeds."""

import logging
import os
import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from petal import __version__, parallel
from petal.cli import bench
from petal.cli.attack import attack
from petal.cli.check import check
from petal.cli.corrupt import corrupt
from petal.cli.demo import demo
from petal.cli.fit import fit
from petal.cli.methods import methods
from petal.cli.report import report
from petal.cli.run import run
from petal.cli.serve import serve
from petal.cli.sweep import sweep
from petal.cli.tune import tune
from petal.errors import PetalError

INTERRUPTED = 130       # exit code after Ctrl-C

app = typer.Typer(
    help="Lifelong test-time adaptation: PETAL, its baselines and its evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, run, sweep, report, fit, tune, corrupt, serve, attack, methods, check):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"petal {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does.")] = False,
) -> None:
    """Options that every command has."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    warnings.simplefilter("default")


def main() -> None:
    """Run the command line; what petal raises on purpose becomes one line and exit code 2."""
    code = _run()
    if parallel.started():      # a rank: what is left of gloo's threads would meet a Python that is ending, and abort it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    """The exit code of the command."""
    try:
        app()
    except PetalError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]petal:[/bold red] {escape(str(error))}", soft_wrap=True)
        return 2
    except (KeyboardInterrupt, SystemExit) as end:      # typer makes an exit of Ctrl-C
        code = end.code if isinstance(end, SystemExit) else INTERRUPTED
        if code == INTERRUPTED:
            Console(stderr=True).print("\npetal: interrupted")
        return code if isinstance(code, int) else int(code is not None)
    return 0
