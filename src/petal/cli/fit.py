"""`petal fit`: a source network, its posterior and its source statistics."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from petal import models
from petal.cli import complete
from petal.cli.common import choose_device, make_console, words
from petal.cli.options import Device, Quiet, fit_bars, options_of, shown_warnings
from petal.data import open_dataset
from petal.errors import ConfigError, ModelError, PetalWarning
from petal.methods.inputs import check_choice
from petal.recipes import FitSettings, load_plugin, recipe
from petal.recipes import fit as fit_network
from petal.recipes.provenance import described
from petal.runs.sources import are_photographs, describe_source, fit_threads, open_train
from petal.source_folder import read_names
from petal.statistics import PARTS


@options_of(FitSettings, overlay="Default: the recipe's, else {}.")
def fit(
    *,
    recipe_name: Annotated[
        str | None, typer.Option("--recipe", help="Take network and settings from cifar10, cifar100, imagenet or digits.",
                                 autocompletion=complete.recipes)
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="A network by name, for example wrn-28-10.", autocompletion=complete.networks)
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Default: the recipe's, else as many as the data has.")] = None,
    data: Annotated[str | None, typer.Option(help="Training images: .npz, CIFAR's Python batches, class folders.")] = None,
    test_data: Annotated[str | None, typer.Option(help="Clean test images, to say how good the result is.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A trained network: only its posterior is collected.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for network, posterior, config.json and fit.json: what --source takes.")
    ] = Path("source"),
    class_names: Annotated[
        Path | None, typer.Option(help="File with the names of the classes, one a line, or JSON. Default: the data's.")
    ] = None,
    plugin: Annotated[Path | None, typer.Option(help="A Python file that adds networks to petal.models.NETWORKS.")] = None,
    given: dict[str, Any],
    collect: Annotated[
        str | None,
        typer.Option(help="Source statistics that some methods need, with commas: prototypes,fisher,styles."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and augmentation.")] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train a source network, or take a trained one (--weights), and collect its SWAG-D posterior.

    Interrupted work continues after its last whole epoch when the command is repeated.
    """
    console = make_console(quiet=quiet)
    if plugin is not None:
        load_plugin(plugin)
    parts = words(collect or "")
    for part in parts:
        check_choice("collect", part, PARTS)
    if recipe_name is None and network is None:
        raise ConfigError("say what to fit: --recipe cifar10, or --network wrn-40-2 with --data")
    chosen = None if recipe_name is None else recipe(recipe_name)
    fit_threads(chosen)
    base = FitSettings() if chosen is None else chosen.fit
    settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    if data is None:
        if chosen is None or not chosen.builtin:
            raise ConfigError("give the training images: --data")
        data, test_data = "digits", test_data or "digits"
    place = choose_device(device)
    train_set = open_train(data)
    test_set = None if test_data is None else open_dataset(test_data)
    name = network or (chosen.network if chosen is not None else "")
    extra = dict(chosen.network_options) if chosen is not None and network is None else {}
    count = classes or (chosen.classes if chosen is not None else int(train_set.labels.max()) + 1)
    model = models.build(name, count, weights, seed=seed, **extra).to(place)
    about = {"recipe": recipe_name, "network_name": name, "classes": count,
             "weights": described(weights) | ({} if weights is None else {"path": weights.name})}  # fmt: skip
    names = None if class_names is None else read_names(class_names)
    if names is not None and len(names) != count:
        raise ConfigError(f"{class_names} names {len(names)} classes, and the network has {count}")
    with shown_warnings(console), fit_bars(console, quiet) as (on_train, on_swag):
        source = None
        try:
            source = describe_source(model, train_set, name, count, extra, names, are_photographs(data))
        except ModelError as error:
            text = f"the folder will have no config.json, so --source cannot take it: {error}"
            warnings.warn(text, PetalWarning, stacklevel=1)
        report = fit_network(
            model, train_set, settings, out, trained=weights is not None, test=test_set, seed=seed, about=about,
            source=source, on_train=on_train, on_swag=on_swag, parts=parts,
            statistics_batch=200 if chosen is None else chosen.batch_size,
        )  # fmt: skip
    if weights is None:
        console.print(f"trained {name} in {report.train_seconds:.0f} s")
    console.print(f"SWAG-D in {report.swag_seconds:.0f} s")
    if report.error is not None and report.posterior_error is not None:
        console.print(f"clean test error: network {report.error:.2%}, mean of the posterior {report.posterior_error:.2%}")
    written = [str(path) for path in (report.network, report.posterior, report.statistics) if path is not None]
    console.print(f"wrote {', '.join(written[:-1])} and {written[-1]}", highlight=False)
    if source is not None:
        console.print(f"as one folder: --source {out}", highlight=False, soft_wrap=True)
