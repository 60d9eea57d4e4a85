"""`petal run`: a table of the paper, or any part of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from petal import parallel
from petal.cli import complete
from petal.cli.common import choose_device, make_console
from petal.cli.launch import launch
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
    with_source,
)
from petal.recipes import TABLE_1
from petal.runs import (
    Experiment,
    Job,
    JobProgress,
    OpenExperiment,
    Tracking,
    jobs_for,
    make_manifest,
    open_run,
    run_job,
)


@options_of(Experiment)
def run(
    *,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="cifar10, cifar10-gradual, cifar100, imagenet, imagenet-3dcc or digits.",
                            autocompletion=complete.recipes)
    ],
    method: Methods = None,
    order: Orders = None,
    seed: Seeds = None,
    given: dict[str, Any],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="METHOD.OPTION=VALUE, for example petal.ema=0.99, or tent.lr=FanIn() "
                                             "for rates that need no search; guard.OPTION and small.OPTION too; may be "
                                             "repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    device: Device = "auto",
    checkpoint_every: Every = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many batches, with a checkpoint; the same command goes on.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Share out the views over so many GPUs of this machine (with --device cpu: processes). "
                     "On several machines, start this command with torchrun instead."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that another rank may be silent before the run ends.")
    ] = parallel.TIMEOUT,
    track: Track = None,
    track_project: TrackProject = "petal",
    track_folder: TrackFolder = None,
    quiet: Quiet = False,
) -> None:
    """Run methods over a benchmark's stream and write everything that happens to a folder.

    If it is interrupted, repeat the command: it continues where it stopped and gives the same numbers. Repeated with other
    methods, orders or seeds it adds them.
    """
    if (gpus or 1) > 1 and not parallel.started():
        launch(gpus or 1, choose_device(device))
        return
    place = choose_device(device)
    ranks = parallel.join(place, timeout)
    quiet = quiet or (ranks is not None and not ranks.first)
    console = make_console(quiet=quiet)
    experiment = Experiment(recipe, **given)
    chosen = experiment.chosen
    table = experiment.rows(method or TABLE_1, settings or [])
    jobs = jobs_for(table, experiment.orders(numbers(order, "--order")), numbers(seed, "--seed") or [0])
    folder = out or Path("runs") / chosen.name
    tracking = Tracking(tuple(track or ()), track_project, track_folder)
    with shown_warnings(console):
        with nullcontext() if ranks is None else ranks.in_turn():
            experiment = with_source(experiment, folder / "source", place, console, quiet)
        opened = experiment.open(place, ranks)
        opened.check(table)
        manifest = make_manifest(opened, jobs, command_line())
        if ranks is None or ranks.first:
            open_run(folder, manifest)
        run_all(jobs, folder, opened, console, checkpoint_every, quiet, stop_after, tracking)
        if ranks is not None:
            ranks.leave()
        if not quiet:
            show_table(folder, console)
        console.print(f"Records are in {folder}; `petal report {folder}` draws them.", markup=False, highlight=False)


def run_all(
    jobs: Sequence[Job], folder: Path, opened: OpenExperiment, console: Console, every: int | None, quiet: bool,
    stop_after: int | None = None, tracking: Tracking | None = None,
) -> None:  # fmt: skip
    """Run the jobs one after the other, with a line for each that is done and a bar for the one that runs."""
    lengths = {number: len(opened.stream(number)) for number in {job.order for job in jobs}}
    several = len({(job.order, job.seed) for job in jobs}) > 1
    with bar(console, quiet) as progress:
        everything = progress.add_task("all methods", total=sum(lengths[job.order] for job in jobs))
        done = 0
        stop = Countdown(stop_after)
        for job in jobs:
            name = job.row.label + (f", order {job.order}, seed {job.seed}" if several else "")
            task = progress.add_task(name, total=lengths[job.order])
            shown = Shown(progress, task, everything, name, done)
            run_job(job, folder, opened, checkpoint_every=every, progress=shown, stop=stop, callbacks=tracking)
            if stop.over and shown.position < lengths[job.order]:
                text = f"{name:<32} stopped at batch {shown.position} of {lengths[job.order]}: the same command goes on"
            else:
                text = f"{name:<32} error {100 * shown.error:6.2f} %{shown.note}"
                done += lengths[job.order]
                progress.remove_task(task)
            progress.console.print(text, highlight=False)
            if stop.over:
                break


class Countdown:
    """Says when so many batches are done, over all jobs; without a number, never."""

    def __init__(self, batches: int | None) -> None:
        self.left = batches

    def __call__(self) -> bool:
        """After every batch."""
        if self.left is not None:
            self.left -= 1
        return self.over

    @property
    def over(self) -> bool:
        """True once the budget is used up."""
        return self.left is not None and self.left <= 0


class Shown:
    """A job's progress on the screen."""

    def __init__(self, progress: Bar, task: TaskID, everything: TaskID, name: str, before: int) -> None:
        self.progress, self.task, self.everything, self.name, self.before = progress, task, everything, name, before
        self.error, self.note, self.position = 0.0, "", 0

    def __call__(self, p: JobProgress) -> None:
        """After every batch."""
        self.error, self.position = p.error, p.position
        if p.resumed and p.record is None:
            self.note = " (was done)" if p.position == p.batches else f" (continued at batch {p.position})"
        where = "" if p.record is None else f"{p.record['domain']}"
        text = f"{self.name}: {100 * p.error:.2f} % so far {where}"
        self.progress.update(self.task, completed=p.position, description=text)
        self.progress.update(self.everything, completed=self.before + p.position)


def show_table(folder: Path, console: Console) -> None:
    """The table of everything in a run's folder."""
    from petal import report  # matplotlib takes a second to import, and only the end of a run needs it

    console.print()
    console.print(report.terminal(report.load(folder)))
