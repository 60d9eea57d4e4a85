"""`petal tune`: alpha and delta on the validation corruptions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from petal._files import replacing
from petal.cli.common import choose_device
from petal.cli.options import (
    bar,
    fit_threads,
    load_posterior,
    open_test,
    shown_warnings,
    source_network,
    source_on_the_spot,
)
from petal.corruptions import VALIDATION_CORRUPTIONS
from petal.errors import ConfigError
from petal.recipes import ALPHAS, Bench, Trial, apply_settings, recipe, rows
from petal.recipes import tune as tune_petal
from petal.recipes.run import described, versions
from petal.recipes.tune import DELTAS


def tune(
    recipe_name: Annotated[str, typer.Argument(metavar="RECIPE", help="The benchmark; see `petal run`.")],
    alpha: Annotated[list[float] | None, typer.Option(help="An alpha to try; may be repeated.")] = None,
    delta: Annotated[list[float] | None, typer.Option(help="A delta to try; may be repeated.")] = None,
    corruption: Annotated[
        list[str] | None, typer.Option(help="A validation corruption; may be repeated. Default: all four.")
    ] = None,
    severity: Annotated[int | None, typer.Option(min=1, max=5, help="Severity. Default: 5.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images a batch. Default: the recipe's.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Take the first so many images of each corruption.")] = None,
    data: Annotated[str | None, typer.Option(help="Clean images, or a folder of published -C files.")] = None,
    corrupted: Annotated[str | None, typer.Option(help="A folder of published -C files.")] = None,
    ids: Annotated[Path | None, typer.Option(help="List of the images of ImageNet-C to use.")] = None,
    weights: Annotated[Path | None, typer.Option(help="The source network.")] = None,
    posterior: Annotated[Path | None, typer.Option(help="The source posterior, from `petal fit`.")] = None,
    network: Annotated[str | None, typer.Option(help="Another network than the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the trials. Default: runs/tune-RECIPE.json.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[Literal["auto", "eager"], typer.Option(help="How it is executed.")] = "auto",
    fidelity: Annotated[Literal["official", "paper"], typer.Option(help="Whose settings to start from.")] = "official",
    settings: Annotated[list[str] | None, typer.Option("--set", help="petal.OPTION=VALUE; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Choose PETAL's alpha, then its delta, by the error on the four validation corruptions: never on the test's."""
    console = Console(quiet=quiet)
    chosen = recipe(recipe_name)
    fit_threads(chosen)
    if chosen.severity is None:                     # a gradual stream is tuned at the highest severity
        chosen = replace(chosen, stream="continual", severity=5)
    if network is not None:
        chosen = replace(chosen, network=network, network_options={})
    row = apply_settings(rows(chosen, fidelity), settings or [])["petal"]
    place = choose_device(device)
    file = out or Path("runs") / f"tune-{chosen.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with shown_warnings(console):
        images_at = open_test(chosen, data, corrupted, ids)
        if chosen.builtin and weights is None and network is None:
            weights, made = source_on_the_spot(chosen, file.parent / f"{chosen.name}-source", place, console, quiet)
            posterior = posterior or made
        model = source_network(chosen, weights, place)
        q = load_posterior(posterior, model)
        if q is None:
            raise ConfigError("PETAL needs the source posterior: make one with `petal fit`, give it as --posterior")
        bench = Bench(chosen, images_at, model, q, fidelity, severity, batch_size, images, engine)
        with bar(console, quiet) as progress:
            task = progress.add_task("trials", total=len(alpha or ALPHAS))

            def shown(number: int, total: int, trial: Trial) -> None:
                text = f"alpha {trial.prior_weight:g}, delta {trial.quantile:g}: error {trial.error:.2%}"
                progress.update(task, completed=number, total=total, description=text)

            names = corruption or list(VALIDATION_CORRUPTIONS)
            trials = tune_petal(
                bench, row, alphas=alpha or ALPHAS, deltas=delta or DELTAS, corruptions=names, seed=seed, progress=shown
            )
    table = Table("alpha", "delta", "error %", "NLL", "Brier", title=f"PETAL (FIM), {chosen.name}: {', '.join(names)}")
    for trial in trials:
        numbers = (f"{100 * trial.error:.2f}", f"{trial.nll:.4f}", f"{trial.brier:.4f}")
        table.add_row(f"{trial.prior_weight:g}", f"{trial.quantile:g}", *numbers, style="bold" if trial is trials[0] else "")
    console.print(table)
    best = trials[0]
    content = {
        "format": "petal-tune-1", "recipe": chosen.name, "fidelity": fidelity, "corruptions": names,
        "severity": bench.severity, "batch_size": bench.batch_size, "images": images, "seed": seed,
        "data": images_at.fingerprint(), "weights": described(weights), "posterior": described(posterior),
        "versions": versions(), "best": best.to_json(), "trials": [trial.to_json() for trial in trials],
    }  # fmt: skip
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    found = f"--set petal.prior_weight={best.prior_weight:g} --set 'petal.restore=Fisher({best.quantile:g})'"
    console.print(f"best: {found}", highlight=False)
    console.print(f"wrote {file}", highlight=False)
