"""`petal tune`: alpha and delta on the validation corruptions."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from petal._files import make_folder, write_json
from petal.cli.common import choose_device
from petal.cli.options import Device, Quiet, bar, options_of, shown_warnings, with_source
from petal.corruptions import VALIDATION_CORRUPTIONS
from petal.recipes.provenance import described, versions
from petal.runs import ALPHAS, DELTAS, Experiment, Trial
from petal.runs import tune as tune_petal


@options_of(Experiment, leave_out=("visits", "label_correlation", "plugin"))
def tune(
    *,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The benchmark; see `petal run`.")],
    alpha: Annotated[list[float] | None, typer.Option(help="An alpha to try; may be repeated.")] = None,
    delta: Annotated[list[float] | None, typer.Option(help="A delta to try; may be repeated.")] = None,
    corruption: Annotated[
        list[str] | None, typer.Option(help="A validation corruption; may be repeated. Default: all four.")
    ] = None,
    given: dict[str, Any],
    settings: Annotated[list[str] | None, typer.Option("--set", help="petal.OPTION=VALUE; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the trials. Default: runs/tune-RECIPE.json.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Choose PETAL's alpha, then its delta, by the error on the four validation corruptions: never on the test's."""
    console = Console(quiet=quiet)
    experiment = Experiment(recipe, stream="continual", **given)
    (row,) = experiment.rows(["petal"], settings or [])
    place = choose_device(device)
    file = out or Path("runs") / f"tune-{recipe}.json"
    make_folder(file.parent)
    with shown_warnings(console):
        experiment = with_source(experiment, file.parent / f"{recipe}-source", place, console, quiet)
        opened = experiment.open(place)
        opened.check([row])
        with bar(console, quiet) as progress:
            task = progress.add_task("trials", total=len(alpha or ALPHAS))

            def shown(number: int, total: int, trial: Trial) -> None:
                text = f"alpha {trial.prior_weight:g}, delta {trial.quantile:g}: error {trial.error:.2%}"
                progress.update(task, completed=number, total=total, description=text)

            names = corruption or list(VALIDATION_CORRUPTIONS)
            trials = tune_petal(
                opened, row, alphas=alpha or ALPHAS, deltas=delta or DELTAS, corruptions=names, seed=seed, progress=shown
            )
    table = Table("alpha", "delta", "error %", "NLL", "Brier", title=f"PETAL (FIM), {recipe}: {', '.join(names)}")
    for trial in trials:
        numbers = (f"{100 * trial.error:.2f}", f"{trial.nll:.4f}", f"{trial.brier:.4f}")
        table.add_row(f"{trial.prior_weight:g}", f"{trial.quantile:g}", *numbers, style="bold" if trial is trials[0] else "")
    console.print(table)
    best = trials[0]
    write_json(file, {
        "format": "petal-tune-1", "recipe": recipe, "fidelity": experiment.fidelity, "corruptions": names,
        "severity": opened.severity, "batch_size": opened.batch_size, "images": experiment.images, "seed": seed,
        "data": opened.images.fingerprint(), "weights": described(experiment.weights),
        "posterior": described(experiment.posterior),
        "versions": versions(), "best": asdict(best), "trials": [asdict(trial) for trial in trials],
    })  # fmt: skip
    found = f"--set petal.prior_weight={best.prior_weight:g} --set 'petal.restore=Fisher({best.quantile:g})'"
    console.print(f"best: {found}", highlight=False)
    console.print(f"wrote {file}", highlight=False)
