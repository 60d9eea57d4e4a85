"""`petal methods`: what there is to choose from."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from petal.cli.common import make_console
from petal.methods import METHODS, Adapter
from petal.recipes import WRAPPERS, load_plugin


def methods(
    plugin: Annotated[Path | None, typer.Option(help="A Python file that adds methods or networks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with papers in full.")] = False,
) -> None:
    """List the methods: what they adapt, what they need, and the streams that they suit.

    "...+asr" and "...+reservoir" go around others: `petal run -m eta+asr -m eata+reservoir`.
    """
    if plugin is not None:
        load_plugin(plugin)
    around = {f"...+{name}": wrapper for name, wrapper in WRAPPERS.items() if wrapper.card is not None}
    known: dict[str, type[Adapter]] = {**METHODS, **around}
    if as_json:
        print(json.dumps({name: method.card and asdict(method.card) for name, method in known.items()}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "method", "year", "adapts", "needs", "small batches", "correlated labels"):
        table.add_column(heading, no_wrap=heading in ("name", "method"))
    for name, method in known.items():
        card = method.card
        table.add_row(name, *([] if card is None else [card.title, str(card.year), *card.cells()]))
    make_console().print(table)
