"""`petal runs`: what is in a folder of runs."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from petal.cli.common import make_console
from petal.runs.listing import Listed, list_runs

COLOURS = {"done": "green", "running": "cyan", "resumable": "yellow", "broken": "bold red"}


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what is in a folder of runs: done, running, resumable (repeat the command that began it), or broken."""
    found = list_runs(folder)
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
        return
    console = make_console()
    if not found:
        console.print(f"nothing in {folder} was written by petal", markup=False, highlight=False)
        return
    console.print(table(found, folder))
    for one in found:
        if one.note:
            console.print(f"{one.path}: {one.note}", style="red", markup=False, highlight=False, soft_wrap=True)


def table(found: Sequence[Listed], folder: Path) -> Table:
    """A line for each; names and states are never broken."""
    out = Table(box=None, pad_edge=False)
    for heading in ("folder", "kind", "of", "state"):
        out.add_column(heading, no_wrap=True)
    for heading in ("rows", "orders", "seeds"):
        out.add_column(heading)
    for heading in ("batches", "size"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("when", no_wrap=True)
    for one in found:
        name = one.path.relative_to(folder) if one.path != folder else one.path
        batches = "" if one.done is None else f"{one.done:,} of {'?' if one.total is None else f'{one.total:,}'}"
        out.add_row(
            escape(str(name)), one.kind, escape(one.about), f"[{COLOURS[one.state]}]{one.state}[/]",
            escape(", ".join(one.rows)), ranges(one.orders), ranges(one.seeds), batches, size(one.size), when(one.when),
        )  # fmt: skip
    return out


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as they are given to --order.

    >>> ranges([1, 2, 3, 7])
    '1-3,7'
    """
    out: list[list[int]] = []
    for number in sorted(numbers):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in out)


def size(count: float) -> str:
    """Bytes, in few figures.

    >>> size(999), size(1_234_567)
    ('999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def when(time: datetime | None) -> str:
    """A time, in the time of this machine."""
    return "" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M}"
