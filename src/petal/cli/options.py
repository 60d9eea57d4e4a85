"""What several commands share: where to print, which device, numbers from text, sources made or read."""

import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from petal import models
from petal.data import KINDS, CorruptedDataset, Dataset, open_dataset
from petal.errors import ConfigError, DataError, PetalWarning
from petal.posterior import DiagonalGaussian, FitProgress
from petal.recipes import Recipe, fit
from petal.recipes.fit import TrainProgress


def numbers(texts: Sequence[str] | None, what: str) -> list[int]:
    """Whole numbers from `1`, `1,3`, `1-5`, in their order, each once.

    >>> numbers(["1-3,7", "2"], "--seed")
    [1, 2, 3, 7]
    """
    found: list[int] = []
    for text in texts or ():
        for part in text.split(","):
            low, dash, high = part.strip().partition("-")
            if not low.isdecimal() or (dash and (not high.isdecimal() or int(high) < int(low))):
                raise ConfigError(f"{what} takes numbers such as 1 or 1,3 or 1-5, got {text!r}")
            found += range(int(low), int(high or low) + 1)
    return list(dict.fromkeys(found))


def fit_threads(recipe: Recipe | None) -> None:
    """One thread for the small network of a built-in recipe: a second one costs it more than it brings."""
    if recipe is not None and recipe.builtin:
        torch.set_num_threads(1)


def command_line() -> str:
    """The command as it was given."""
    name = Path(sys.argv[0]).name
    return shlex.join(["petal" if name == "__main__.py" else name, *sys.argv[1:]])


@contextmanager
def shown_warnings(console: Console) -> Iterator[None]:
    """Print `PetalWarning`s as one line each, each once."""
    seen: set[str] = set()
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: Any = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if not issubclass(category, PetalWarning):
            before(message, category, filename, lineno, file, line)
        elif str(message) not in seen:
            seen.add(str(message))
            console.print(f"[yellow]warning:[/] {message}", highlight=False)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def bar(console: Console, quiet: bool = False) -> Progress:
    """A progress display: what, how far, and the time left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/]"),
        TimeRemainingColumn(),
        console=console,
        disable=quiet,
        transient=True,
    )


def open_test(recipe: Recipe, data: str | None, corrupted: str | None, ids: Path | None) -> Dataset:
    """The images to adapt to: clean ones, which are corrupted on the fly, or the published -C files."""
    if data is not None and corrupted is not None:
        raise ConfigError("give --data (clean images, or a -C folder) or --corrupted (a -C folder), not both")
    path = data or corrupted
    if path is None:
        if not recipe.builtin:
            raise ConfigError(f"{recipe.name} needs images: give --data or --corrupted, {recipe.data}")
        path = "digits"
    options: dict[str, Any] = {}
    kind = _kind(path)
    if kind == "image-folder":
        options["size"] = 224
    if ids is not None:
        if kind not in ("imagenet-c", "imagenet-3dcc"):
            raise ConfigError("--ids is a list of images of an ImageNet-C or ImageNet-3DCC folder")
        options["ids"] = ids
    dataset = open_dataset(path, **options)
    if corrupted is not None and not isinstance(dataset, CorruptedDataset):
        raise DataError(f"{corrupted} holds clean images, not the published -C files; give it as --data")
    return dataset


def open_train(path: str) -> Dataset:
    """The training images at a path."""
    kind = _kind(path)
    if path == "digits":
        return open_dataset("digits:train")
    if kind == "cifar":
        return open_dataset(path, split="train")
    return open_dataset(path, size=224) if kind == "image-folder" else open_dataset(path)


def _kind(path: str) -> str | None:
    return next((name for name, known in KINDS.items() if Path(path).exists() and known.fits(Path(path))), None)


def source_network(recipe: Recipe, weights: Path | None, device: torch.device) -> nn.Module:
    """The recipe's network with these weights, on a device."""
    if weights is None:
        raise ConfigError(
            f"{recipe.name} needs the source network ({recipe.network}): give --weights, or make it with `petal fit "
            f"--recipe {recipe.name}`"
        )
    return models.build(recipe.network, recipe.classes, weights, **recipe.network_options).to(device)


def source_on_the_spot(
    recipe: Recipe, folder: Path, device: torch.device, console: Console, quiet: bool = False
) -> tuple[Path, Path]:
    """Network and posterior of a recipe whose data comes with the package, in `folder`: made unless they are there."""
    network, posterior = folder / "network.safetensors", folder / "posterior.safetensors"
    if not (folder / "fit.json").is_file() or not network.is_file() or not posterior.is_file():
        model = models.build(recipe.network, recipe.classes, seed=0, **recipe.network_options).to(device)
        with fit_bars(console, quiet) as (on_train, on_swag):
            fit(model, open_dataset("digits:train"), recipe.fit, folder, test=open_dataset("digits:test"),
                on_train=on_train, on_swag=on_swag)  # fmt: skip
    return network, posterior


@contextmanager
def fit_bars(console: Console, quiet: bool) -> Iterator[tuple[Any, Any]]:
    """Progress of training and of SWAG-D, as callbacks."""
    with bar(console, quiet) as progress:
        tasks: dict[str, Any] = {}

        def on_train(p: TrainProgress) -> None:
            task = tasks.setdefault("train", None)
            if task is None:
                tasks["train"] = task = progress.add_task("training the source network", total=p.epochs * p.batches)
            done = (p.epoch - 1) * p.batches + p.batch
            progress.update(task, completed=done, description=f"training, epoch {p.epoch}/{p.epochs}, loss {p.loss:.3f}")

        def on_swag(p: FitProgress) -> None:
            task = tasks.setdefault("swag", None)
            if task is None:
                tasks["swag"] = task = progress.add_task("SWAG-D", total=p.epochs * (p.batches or 1))
            done = (p.epoch - 1) * (p.batches or 1) + p.batch
            text = f"SWAG-D, epoch {p.epoch}/{p.epochs}, {p.snapshots} snapshots, loss {p.loss:.3f}"
            progress.update(task, completed=done, description=text)

        yield on_train, on_swag


def load_posterior(path: Path | None, model: nn.Module) -> DiagonalGaussian | None:
    """The posterior at a path, checked against the network."""
    if path is None:
        return None
    q = DiagonalGaussian.load(path)
    q.check(model)
    return q
