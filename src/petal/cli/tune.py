"""`petal tune`: settings of a method on the validation corruptions."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from petal._files import make_folder, write_json
from petal.cli import complete
from petal.cli.common import choose_device, make_console
from petal.cli.options import Device, Quiet, bar, options_of, shown_warnings, with_source
from petal.corruptions import VALIDATION_CORRUPTIONS
from petal.errors import ConfigError
from petal.methods import METHODS, Petal
from petal.recipes import WRAPPERS, Row
from petal.recipes.provenance import described, versions
from petal.recipes.settings import as_json, checked
from petal.restore import Fisher
from petal.runs import ALPHAS, DELTAS, ORDER, WAYS, Experiment, Trial
from petal.runs import tune as find_best


@options_of(Experiment, leave_out=("visits", "label_correlation", *ORDER, *WAYS))
def tune(
    *,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="The benchmark; see `petal run`.", autocompletion=complete.recipes)
    ],
    method: Annotated[
        str, typer.Option("--method", "-m", help="A row of `petal run`, for example tent.", autocompletion=complete.methods)
    ] = "petal",
    values: Annotated[
        list[str] | None,
        typer.Option("--try", help="OPTION=VALUE,VALUE,...: the values of a setting, for example lr=1e-4,3e-4,1e-3, or of "
                     "what goes around the method, small.memory=32,64; may be repeated: one setting after the other, with "
                     "the best of those before."),
    ] = None,
    alpha: Annotated[list[float] | None, typer.Option(help="An alpha of PETAL to try; may be repeated.")] = None,
    delta: Annotated[list[float] | None, typer.Option(help="A delta of PETAL to try; may be repeated.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="End after so many trials.")] = None,
    corruption: Annotated[
        list[str] | None, typer.Option(help="A validation corruption; may be repeated. Default: all four.")
    ] = None,
    given: dict[str, Any],
    settings: Annotated[list[str] | None, typer.Option("--set", help="METHOD.OPTION=VALUE; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the trials. Default: runs/tune-RECIPE.json.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Choose settings by the error on the four validation corruptions, never on the test's.

    Without --try: PETAL's alpha, then its delta.
    """
    console = make_console(quiet=quiet)
    experiment = Experiment(recipe, stream="continual", **given)
    (row,) = experiment.rows([method], settings or [])
    grid = grid_of(row, values or [], alpha, delta)
    place = choose_device(device)
    file = out or Path("runs") / f"tune-{recipe}.json"
    make_folder(file.parent)
    with shown_warnings(console):
        experiment = with_source(experiment, file.parent / f"{recipe}-source", place, console, quiet)
        opened = experiment.open(place)
        opened.check([row])
        with bar(console, quiet) as progress:
            task = progress.add_task("trials", total=sum(map(len, grid.values())))

            def shown(number: int, total: int, trial: Trial) -> None:
                progress.update(task, completed=number, total=total, description=f"{words(trial)}: error {trial.error:.2%}")

            names = corruption or list(VALIDATION_CORRUPTIONS)
            trials = find_best(opened, row, grid, budget=budget, corruptions=names, seed=seed, progress=shown)
    table = Table(*grid, "error %", "NLL", "Brier", "ECE", title=f"{row.label}, {recipe}: {', '.join(names)}")
    for trial in trials:
        shown_values = [str(as_json(value)) for value in trial.options.values()]
        numbers = (f"{100 * trial.error:.2f}", f"{trial.nll:.4f}", f"{trial.brier:.4f}", f"{trial.ece:.4f}")
        table.add_row(*shown_values, *numbers, style="bold" if trial is trials[0] else "")
    console.print(table)
    write_json(file, {
        "format": "petal-tune-2", "recipe": recipe, "row": row.name, "fidelity": experiment.fidelity, "corruptions": names,
        "severity": opened.severity, "batch_size": opened.batch_size, "images": experiment.images, "seed": seed,
        "stream_seed": experiment.stream_seed, "data": opened.images.fingerprint(),
        "weights": described(experiment.weights), "posterior": described(experiment.posterior),
        "versions": versions(), "best": plain(trials[0]), "trials": [plain(trial) for trial in trials],
    })  # fmt: skip
    found = [(name if "." in name else f"{row.method}.{name}", as_json(value)) for name, value in trials[0].options.items()]
    console.print("best: " + " ".join(f"--set '{name}={value}'" for name, value in found), highlight=False, soft_wrap=True)
    console.print(f"wrote {file}", highlight=False)


def grid_of(
    row: Row, values: Sequence[str], alphas: Sequence[float] | None, deltas: Sequence[float] | None
) -> dict[str, list[Any]]:
    """The values to try of each option of a row, each of its type."""
    grid: dict[str, list[Any]] = {}
    for given in values:
        left, equals, texts = given.partition("=")
        name, option = left.strip(), left.strip().rpartition(".")[2]
        around = name.rpartition(".")[0]
        if not equals or not option:
            raise ConfigError(f"values to try are written OPTION=VALUE,VALUE, for example lr=1e-4,1e-3; got {given!r}")
        if around in (row.name, row.method):
            name, around = option, ""
        if around and around not in row.wraps:
            raise ConfigError(f"{row.name} has nothing called {around!r} around it: cannot try {given!r}")
        kind = WRAPPERS[around] if around else METHODS[row.method]
        grid[name] = [checked(around or row.name, kind, option, text) for text in re.split(r",(?![^(\[]*[)\]])", texts)]
    if not issubclass(METHODS[row.method], Petal):
        if alphas or deltas:
            raise ConfigError(f"--alpha and --delta are PETAL's; for {row.name} give --try OPTION=VALUE,VALUE")
    elif alphas or deltas or not grid:
        grid = {"prior_weight": list(alphas or ALPHAS), "restore": [Fisher(d) for d in deltas or DELTAS], **grid}
    if not grid:
        raise ConfigError(f"say what to try of {row.name}: --try OPTION=VALUE,VALUE, for example --try lr=1e-4,3e-4,1e-3")
    return grid


def words(trial: Trial) -> str:
    """Settings in a line."""
    return ", ".join(f"{name} {as_json(value)}" for name, value in trial.options.items())


def plain(trial: Trial) -> dict[str, Any]:
    """A trial as JSON."""
    return {**asdict(trial), "options": {name: as_json(value) for name, value in trial.options.items()}}
