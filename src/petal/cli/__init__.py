"""The command `petal`: the only layer that prints, picks devices and seeds."""

import logging
import os
import sys
import warnings
from typing import Annotated

import typer
from rich.markup import escape

from petal import __version__, parallel
from petal.cli import bench
from petal.cli.apply import apply
from petal.cli.attack import attack
from petal.cli.check import check
from petal.cli.codes import INTERRUPTED, LOST, PARTLY, REFUSED
from petal.cli.common import make_console
from petal.cli.corrupt import corrupt
from petal.cli.demo import demo
from petal.cli.doctor import doctor
from petal.cli.fit import fit
from petal.cli.methods import methods
from petal.cli.protocols import protocols
from petal.cli.report import report
from petal.cli.run import run
from petal.cli.runs import runs
from petal.cli.serve import serve
from petal.cli.sweep import SomeFailed, sweep
from petal.cli.tune import tune
from petal.errors import PetalError
from petal.parallel import ParallelError

app = typer.Typer(
    help="Lifelong test-time adaptation: PETAL, its baselines and its evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo, apply, run, sweep, runs, report, fit, tune, corrupt, serve, attack, methods, protocols, check, doctor,
):  # fmt: skip
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
    """Run the command line; what petal raises on purpose becomes one line and an exit code."""
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
        make_console(stderr=True, highlight=False).print(f"[bold red]petal:[/bold red] {escape(str(error))}", soft_wrap=True)
        return LOST if isinstance(error, ParallelError) else PARTLY if isinstance(error, SomeFailed) else REFUSED
    except (KeyboardInterrupt, SystemExit) as end:      # typer makes an exit of Ctrl-C
        code = end.code if isinstance(end, SystemExit) else INTERRUPTED
        if code == INTERRUPTED:
            make_console(stderr=True).print("\npetal: interrupted")
        return code if isinstance(code, int) else int(code is not None)
    return 0
