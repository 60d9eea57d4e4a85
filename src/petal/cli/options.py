"""What several commands share: options made of dataclasses, numbers from text, where to print, sources made with bars."""

import inspect
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from petal._options import Option
from petal.cli import complete
from petal.errors import ConfigError, PetalWarning
from petal.recipes.fit import TrainProgress
from petal.runs import Experiment
from petal.runs.sources import fit_threads
from petal.swag import FitProgress

Methods = Annotated[
    list[str] | None,
    typer.Option("--method", "-m", autocompletion=complete.methods,
                 help="A row of the table; may be repeated. Default: the eight of Table 1. Also: "
                 "petal-none, petal-sres-0.03, the methods of a plugin, and any of them with a guard and the "
                 "small-batch mode around it: petal+guard, petal+small, petal+small+guard. Around methods that adapt one "
                 "network also resets when predictions collapse, eta+asr, and weights for each domain, eata+reservoir."),
]
Orders = Annotated[list[str] | None, typer.Option("--order", help="Published orders: 1, or 1,3 or 1-10.")]
Seeds = Annotated[list[str] | None, typer.Option("--seed", help="Seeds, as 0 or 0,2 or 0-4.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Every = Annotated[
    int | None,
    typer.Option("--checkpoint-every", min=1, help="Batches between checkpoints. Default: about every 20 seconds."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also write records to tensorboard, wandb or mlflow; may be repeated."),
]
TrackProject = Annotated[str, typer.Option("--track-project", help="Project or experiment that they are put into.")]
TrackFolder = Annotated[
    Path | None, typer.Option("--track-folder", help="Folder of their files. Default: the run's.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def options_of(
    kind: type, leave_out: Collection[str] = (), each: Collection[str] = (), overlay: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass that says what to show of it (`petal._options`).

    The command's parameter `given` gets them as a dict by the names of the fields, and its place in the help is theirs.
    Those in `each` are lists of texts, RECIPE=VALUE where recipes differ. With `overlay`, how a default is told, what is not
    given is None: the command lays what is given over other settings.
    """
    hints = get_type_hints(kind)
    shown = {f.name: f for f in fields(kind) if "option" in f.metadata and f.name not in leave_out}

    def parameter(name: str) -> inspect.Parameter:
        about: Option = shown[name].metadata["option"]
        hint, default, text = hints[name], shown[name].default, about.help
        if name in each:
            hint, text = list[str] | None, text.rstrip(".") + "; RECIPE=VALUE where the recipes differ; may be repeated."
        elif about.text:
            hint, default = str | None, None
        elif about.choices:
            hint = Literal[about.choices]
        elif tuple in (get_origin(hint), hint):
            hint = list[str] | None
        if overlay:
            if not (default is None or isinstance(default, (bool, tuple)) or "Default" in text):
                text += f" {overlay.format(f'{default:g}' if isinstance(default, float) else default)}"
            hint, default = hint | None, None
        flag = f"--{name.replace('_', '-')}"
        flags = [f"{flag}/--no-{flag[2:]}" if bool in (hint, *get_args(hint)) else flag, *about.flags]
        made = typer.Option(
            *flags, help=text, min=about.low, max=about.high, rich_help_panel=about.panel,
            metavar=None if name in each else about.metavar, autocompletion=complete.BY_NAME.get(name),
        )  # fmt: skip
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, made])

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command).parameters.values():
            if own.name == "given":
                parameters += map(parameter, shown)
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def called(**values: Any) -> None:
            command(given={name: values.pop(name) for name in shown}, **values)

        called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {}
        return called

    return decorate


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


def with_source(
    experiment: Experiment, folder: Path, device: torch.device, console: Console, quiet: bool = False
) -> Experiment:
    """The experiment with its source: that of a built-in recipe is made in `folder`, with bars, and with one thread."""
    fit_threads(experiment.chosen)
    with fit_bars(console, quiet) as (on_train, on_swag):
        return experiment.with_source(folder, device, on_train, on_swag)


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
