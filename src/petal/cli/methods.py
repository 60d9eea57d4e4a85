"""`petal methods`: what there is to choose from."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from petal.methods import METHODS
from petal.recipes import load_plugin


def methods(
    plugin: Annotated[Path | None, typer.Option(help="A Python file that adds methods to petal.METHODS.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with papers in full.")] = False,
) -> None:
    """List the methods: what they adapt, what they need, and the streams that they suit."""
    if plugin is not None:
        load_plugin(plugin)
    if as_json:
        print(json.dumps({name: method.card and asdict(method.card) for name, method in METHODS.items()}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "method", "year", "adapts", "needs", "small batches", "correlated labels"):
        table.add_column(heading, no_wrap=heading in ("name", "method"))
    for name, method in METHODS.items():
        card = method.card
        table.add_row(name, *([] if card is None else [card.title, str(card.year), *card.cells()]))
    Console().print(table)
