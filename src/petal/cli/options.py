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
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from petal.errors import ConfigError, PetalWarning
from petal.recipes import Recipe
from petal.recipes.fit import TrainProgress
from petal.recipes.setup import load_posterior, make_source, open_test, open_train, source_network
from petal.swag import FitProgress

__all__ = [
    "bar",
    "command_line",
    "fit_bars",
    "fit_threads",
    "load_posterior",
    "numbers",
    "open_test",
    "open_train",
    "shown_warnings",
    "source_network",
    "source_on_the_spot",
]


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
            console.print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False)

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


def source_on_the_spot(
    recipe: Recipe, folder: Path, device: torch.device, console: Console, quiet: bool = False
) -> tuple[Path, Path]:
    """Network and posterior of a recipe whose data comes with the package, in `folder`: made unless they are there."""
    with fit_bars(console, quiet) as (on_train, on_swag):
        return make_source(recipe, folder, device, on_train, on_swag)


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
