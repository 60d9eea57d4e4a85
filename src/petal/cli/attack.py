"""`petal attack`: what attacks on its stream cost a method."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from petal._files import make_folder
from petal.attacks import ATTACKS, measure
from petal.cli.common import choose_device, make_console
from petal.cli.options import Device, Quiet, bar, options_of, shown_warnings, with_source
from petal.errors import ConfigError
from petal.recipes.names import unknown
from petal.runs import ORDER, WAYS, Experiment
from petal.runs.records import Lines

FOLDER = Path("runs/attack")        # where the source of a built-in recipe is made, or was


@options_of(Experiment, leave_out=("visits", "label_correlation", *ORDER, *WAYS))
def attack(
    *,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The benchmark; see `petal run`.")],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="A row of `petal run`, such as petal-f+robust+screen; may be repeated."),
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", "-a", help=f"One of {', '.join(ATTACKS)}; may be repeated. `none` is always there."),
    ] = None,
    share: Annotated[list[float] | None, typer.Option(help="Share of the images that are the attacker's; may be repeated. "
                                                     "Default: 0.2.")] = None,
    clean: Annotated[int, typer.Option(min=0, help="Clean batches after the attack, the first of the stream again.")] = 10,
    given: dict[str, Any],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="METHOD.OPTION=VALUE, such as screen.quarantine=3; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of method and attack.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the records, a line of JSON a measurement.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure attacks: error on the benign images while they last, and on clean batches after, against no attack.

    Without --attack: all of them. Each measurement begins with a fresh adapter.
    """
    console = make_console(quiet=quiet)
    for name in attacks or ():
        if name not in ATTACKS:
            raise unknown("attack", name, ATTACKS)
    shares = share or [0.2]
    if not all(0 < value <= 1 for value in shares):
        raise ConfigError(f"--share is above 0 and at most 1, got {', '.join(map(str, shares))}")
    experiment = Experiment(recipe, stream="continual", **given)
    rows = experiment.rows(method or ["petal-f"], settings or [])
    wanted = dict.fromkeys(["none", *(attacks or ATTACKS)])
    columns = [f"{100 * value:g} %: during (after)" for value in shares]
    table = Table("method", "attack", *columns, title=f"attacks on {recipe}")
    if out is not None:
        make_folder(out.parent)
    with shown_warnings(console):
        place = choose_device(device)
        opened = with_source(experiment, FOLDER / "source", place, console, quiet).open(place)
        opened.check(rows)
        stream = opened.stream(experiment.chosen.numbers[0])
        with bar(console, quiet) as progress:
            task = progress.add_task("attacks", total=len(rows) * len(wanted) * len(shares) * (len(stream) + clean))
            for row in rows:
                for name in wanted:
                    cells = []
                    for value in shares:
                        progress.update(task, description=f"{row.name}, {name}, {100 * value:g} %")
                        found = measure(
                            opened.adapter(row, seed), stream, ATTACKS[name](), value, clean, seed,
                            lambda _: progress.advance(task),
                        )  # fmt: skip
                        cells.append(f"{100 * found.during:.1f} ({100 * found.after:.1f})")
                        if out is not None:
                            line = {"format": "petal-attack-1", "recipe": recipe, "row": row.name, "attack": name,
                                    "share": value, "seed": seed, "settings": settings or [], "batches": len(stream),
                                    "after_batches": clean, "during": plain(found.during), "after": plain(found.after),
                                    "records": [record.to_json() for record in found.records]}  # fmt: skip
                            with Lines(out) as lines:
                                lines.add(json.dumps(line))
                    table.add_row(row.name, name, *cells, end_section=name == list(wanted)[-1])
                    progress.console.print(f"{row.name:<24} {name:<14} {'  '.join(cells)}", highlight=False)
    console.print(table)
    if out is not None:
        console.print(f"records are in {out}", markup=False, highlight=False)


def plain(error: float) -> float | None:
    """An error as JSON has it: NaN is none."""
    return None if math.isnan(error) else error
