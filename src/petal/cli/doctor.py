"""`petal doctor`: is this installation in order, and how will a network run here?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from petal.cli.common import choose_device, words
from petal.errors import ConfigError

SHOWN = {"note": "[yellow]note[/]   ", "problem": "[bold red]problem[/]"}


def doctor(
    network: Annotated[str, typer.Option(help="The network to try: wrn-40-2, timm:NAME, ...")] = "small",
    classes: Annotated[int, typer.Option(min=2, help="How many classes it has.")] = 10,
    weights: Annotated[Path | None, typer.Option(help="Its weights. Default: random ones.")] = None,
    shape: Annotated[str, typer.Option("--input", metavar="SHAPE", help="Of a sample.")] = "3,32,32",
    batch_size: Annotated[int, typer.Option(min=2, help="Samples per batch of the test.")] = 8,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compiles: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Try the compiler too, which takes its time. Default: yes.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at versions, machine, device and compiler; say how the engine runs a network here, what runs eager and why.

    Two steps of the recommended adapter are compared with the plain code, and a checkpoint is written and read. The exit
    code is 0 if all is well and 1 if something must be put in order.
    """
    from petal import models
    from petal.doctor import examine, in_words

    sizes = words(shape)
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input is a shape such as 3,32,32; got {shape!r}")
    place = choose_device(device)
    made = models.build(network, classes, weights, seed=0)
    with Console(stderr=True).status("looking"):
        report = examine(made, [int(size) for size in sizes], place, batch_size, compiles)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        console = Console()
        parts = {"versions": report.versions, "machine": report.machine, f"engine, for {network}": report.engine,
                 "test: engine against plain code": report.test}  # fmt: skip
        for title, part in parts.items():
            table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
            table.add_column(min_width=24, no_wrap=True)
            table.add_column()
            for name, value in in_words(part).items():
                table.add_row(name, escape(value))
            console.print(table)
            console.print()
        for found in report.findings:
            console.print(f"{SHOWN[found.state]} {found.about}: {escape(found.text)}", highlight=False, soft_wrap=True)
        console.print("[green]healthy[/]" if report.healthy else "[bold red]not healthy[/]")
    if not report.healthy:
        raise typer.Exit(1)
