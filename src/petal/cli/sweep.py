"""`petal sweep`: a grid of runs on Ray, or one after the other."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from petal.cli import complete
from petal.cli.common import choose_device, make_console
from petal.cli.options import (
    Device,
    Every,
    Methods,
    Orders,
    Quiet,
    Seeds,
    Track,
    TrackFolder,
    TrackProject,
    bar,
    command_line,
    numbers,
    options_of,
    shown_warnings,
)
from petal.cli.run import show_table
from petal.errors import ConfigError, PetalError
from petal.recipes import TABLE_1
from petal.runs import Experiment, Tracking, jobs_for
from petal.sweep import (
    JobWatch,
    Outcome,
    Part,
    Ready,
    Resources,
    Task,
    connected,
    grid_rows,
    in_turn,
    on_ray,
    prepare,
    prepare_on_ray,
    what_is_left,
    write_sweep,
)

# What may differ from recipe to recipe
EACH = ("data", "corrupted", "ids", "source", "weights", "posterior", "statistics",
        "network")  # fmt: skip


@options_of(Experiment, each=EACH)
def sweep(
    *,
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="One or more recipes; see `petal run`.",
                                  autocompletion=complete.recipes)
    ],
    method: Methods = None,
    order: Orders = None,
    seed: Seeds = None,
    given: dict[str, Any],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="METHOD.OPTION=VALUE; several values, separated by commas, are all run, in every "
                     "combination with those of other settings. May be repeated."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the sweep; on a cluster, one that all machines see.")
    ] = Path("runs/sweep"),
    device: Device = "auto",
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs for each run. Default: 1.")] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs for each run, or a fraction of one. Default: 1 if there are some.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster, for example auto or ray://head:10001. Default: Ray on this machine.")
    ] = None,
    local_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of Ray on this machine. Default: all.")] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="How often a run that is lost or fails is begun again. Default: 3.")
    ] = None,
    checkpoint_every: Every = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="One run after the other, without Ray.")] = False,
    track: Track = None,
    track_project: TrackProject = "petal",
    track_folder: TrackFolder = None,
    quiet: Quiet = False,
) -> None:
    """Run a grid of recipes, methods, orders, seeds and settings as independent runs on Ray.

    Runs that are lost or fail are begun again from their checkpoints. Repeat the command to finish what is left; what is
    done is not done again. `petal report` reads the folder.
    """
    console = make_console(quiet=quiet)
    of_ray = {"--cpus": cpus, "--gpus": gpus, "--address": address, "--local-cpus": local_cpus, "--retries": retries}
    if sequential and (useless := [name for name, value in of_ray.items() if value is not None]):
        raise ConfigError(f"{', '.join(useless)} is for Ray, and --sequential does without: leave one of them out")
    kind, each = share_of(device, gpus, sequential)
    names = list(dict.fromkeys(recipes))
    folder = out.resolve()
    given["plugin"] = whole(given["plugin"])
    tracking = Tracking(tuple(track or ()), track_project, track_folder and track_folder.resolve())
    parts = []
    for name in names:
        own = {what: value_for(name, names, given[what], f"--{what}") for what in EACH}
        own |= {what: whole(own[what]) for what in EACH if what != "network"}
        experiment = Experiment(name, **{**given, **own})
        table = grid_rows(experiment.known_rows(), method or TABLE_1, settings or [])
        orders = experiment.orders(numbers(order, "--order"))
        jobs = jobs_for(table, orders, numbers(seed, "--seed") or [0])
        parts.append(Part(experiment, tuple(jobs), folder / name, kind, checkpoint_every, command_line(), tracking))
    left = what_is_left(folder, parts)
    count = sum(len(part.jobs) for part in parts)
    if not left:
        console.print(f"All {count} runs are done; `petal report {out}` shows them.", markup=False, highlight=False)
        return
    resources = Resources(1 if cpus is None else cpus, each, 3 if retries is None else retries, address, local_cpus)
    with shown_warnings(console), ExitStack() as stack:
        ray = None if sequential else stack.enter_context(connected(resources))
        with console.status("preparing"):
            ready = [prepare(p) for p in left] if ray is None else prepare_on_ray(ray, left, resources, lambda: None)
        tasks, batches = all_of(ready, left, console)
        write_sweep(folder, left, command_line())
        todo = [task for task in tasks if not task.done]
        board = Board(console, quiet, todo, batches, already=count - len(todo))
        with board.progress:
            board.show(in_turn(todo, board.tick) if ray is None else on_ray(ray, todo, resources, board.tick))
    if not quiet:
        show_table(folder, console)
    console.print(f"Records are in {out}; `petal report {out}` draws them.", markup=False, highlight=False)
    if board.failed:
        told = "; ".join(f"{o.name}: {o.failed}" for o in board.failed[:5])
        raise SomeFailed(f"{len(board.failed)} of {count} runs failed; repeat the command to try them again. {told}")


class SomeFailed(PetalError):
    """Some runs of a sweep failed; the others are done."""


def share_of(device: str, gpus: float | None, sequential: bool) -> tuple[str, float]:
    """The kind of device the runs use, and how many GPUs each asks Ray for."""
    if device == "cpu" and gpus:
        raise ConfigError(f"--device cpu and --gpus {gpus:g} exclude each other")
    if sequential:
        return str(choose_device(device)), 0
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: Ray deals out the GPUs; say cuda, cpu or auto")
    if gpus is None:
        gpus = 1 if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else 0
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda needs a share of a GPU for each run: give --gpus, for example 0.25")
    return "cuda" if gpus else "cpu", gpus


def value_for(name: str, names: Sequence[str], given: Sequence[str] | None, what: str) -> str | None:
    """The value that an option has for a recipe: given for it by name, or for all.

    >>> value_for("cifar10", ["cifar10", "cifar100"], ["a", "cifar100=b"], "--data")
    'a'
    >>> value_for("cifar100", ["cifar10", "cifar100"], ["a", "cifar100=b"], "--data")
    'b'
    """
    own: dict[str, str] = {}
    common: list[str] = []
    for text in given or ():
        left, equals, right = text.partition("=")
        if equals and left in names:
            own[left] = right
        else:
            common.append(text)
    if len(common) > 1:
        raise ConfigError(f"{what} is given for all recipes twice: {common[0]} and {common[1]}; write RECIPE=VALUE")
    return own.get(name, common[0] if common else None)


def whole(path: str | None) -> str | None:
    """A path that means the same in every process; a name that is no path stays."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def all_of(ready: Sequence[Ready], parts: Sequence[Part], console: Console) -> tuple[list[Task], dict[str, int]]:
    """The tasks of all parts; an error, before anything runs, if one of them cannot be run."""
    for part, made in zip(parts, ready, strict=True):
        for text in made.warnings:
            console.print(f"[yellow]warning:[/] {part.name}: {escape(text)}", highlight=False)
        if made.failed:
            raise ConfigError(f"{part.name}: {made.failed}" if len(parts) > 1 else made.failed)
    return [task for made in ready for task in made.tasks], {k: n for made in ready for k, n in made.batches.items()}


class Board:
    """All runs on the screen: one bar for everything, one for each that is running, a line for each that is over."""

    def __init__(self, console: Console, quiet: bool, tasks: Sequence[Task], batches: dict[str, int], already: int) -> None:
        self.console = console
        self.watches = {task.name: JobWatch(task.place, batches[task.name]) for task in tasks}
        self.total, self.already = len(tasks), already
        self.over: list[Outcome] = []
        self.told: set[str] = set()
        self.progress = bar(console, quiet)
        self.everything = self.progress.add_task("all runs", total=sum(w.batches for w in self.watches.values()))
        self.bars = {name: self.progress.add_task(name, total=w.batches, visible=False) for name, w in self.watches.items()}
        self.looked = 0.0

    @property
    def failed(self) -> list[Outcome]:
        """Those that did not come to their end."""
        return [outcome for outcome in self.over if outcome.failed]

    def show(self, outcomes: Iterable[Outcome]) -> None:
        """Follow the outcomes to the last."""
        for outcome in outcomes:
            self.end(outcome)

    def tick(self) -> None:
        """Look at the records now and then, and move the bars."""
        if time.monotonic() - self.looked < 0.3:
            return
        ended = {outcome.name for outcome in self.over}
        for name, watch in self.watches.items():
            if name in ended:
                continue
            watch.look()
            again = f", begun again {watch.restarts} times" if watch.restarts else ""
            text = f"{escape(name)}: {100 * watch.error:.2f} % so far{again}"
            self.progress.update(self.bars[name], completed=watch.position, visible=watch.position > 0, description=text)
        text = f"all runs: {len(self.over)} of {self.total} done"
        done = sum(watch.position for watch in self.watches.values())
        self.progress.update(self.everything, completed=done, description=text)
        self.looked = time.monotonic()

    def end(self, outcome: Outcome) -> None:
        """A run is over."""
        self.over.append(outcome)
        self.watches[outcome.name].look()
        self.progress.update(self.bars[outcome.name], visible=False)
        number = f"{len(self.over) + self.already}/{self.total + self.already}"
        failed = f"[red]failed:[/] {escape(outcome.failed)}"
        result = failed if outcome.failed else f"error {100 * outcome.scores['error']:6.2f} %"
        self.console.print(f"{number:>7} {escape(f'{outcome.name:<40}')} {result}", highlight=False)
        for text in outcome.warnings:
            if text not in self.told:
                self.told.add(text)
                self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False)
