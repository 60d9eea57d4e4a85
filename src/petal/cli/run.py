"""`petal run`: a table of the paper, or any part of it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from petal import parallel
from petal.cli.common import choose_device
from petal.cli.launch import launch
from petal.cli.options import (
    bar,
    command_line,
    fit_threads,
    load_posterior,
    numbers,
    open_test,
    shown_warnings,
    source_network,
    source_on_the_spot,
)
from petal.errors import ConfigError
from petal.methods import METHODS
from petal.recipes import (
    TABLE_1,
    WRAPPERS,
    Bench,
    Job,
    Progress,
    Row,
    apply_settings,
    jobs_for,
    load_plugin,
    make_manifest,
    open_run,
    pick_rows,
    recipe,
    rows,
    run_job,
)
from petal.recipes.rows import needs_posterior


def run(
    recipe_name: Annotated[
        str, typer.Argument(metavar="RECIPE", help="cifar10, cifar10-gradual, cifar100, imagenet, imagenet-3dcc or digits.")
    ],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="A row of the table; may be repeated. Default: the eight of Table 1. Also: "
                     "petal-none, petal-sres-0.03, the methods of a plugin, and any of them with a guard and the "
                     "small-batch mode around it: petal+guard, petal+small, petal+small+guard."),
    ] = None,
    order: Annotated[list[str] | None, typer.Option(help="Published orders: 1, or 1,3 or 1-10.")] = None,
    seed: Annotated[list[str] | None, typer.Option(help="Seeds, as 0 or 0,2 or 0-4.")] = None,
    severity: Annotated[int | None, typer.Option(min=1, max=5, help="Severity. Default: 5.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images a batch. Default: the recipe's.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Take the first so many images of each domain.")] = None,
    visits: Annotated[
        int | None, typer.Option(min=1, help="Let the domains come again and again, so many times in all.")
    ] = None,
    label_correlation: Annotated[
        float | None, typer.Option(help="Let labels come in runs: a Dirichlet concentration, the smaller the longer; 0.1.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Clean images, corrupted on the fly, or a folder of published -C files.")
    ] = None,
    corrupted: Annotated[str | None, typer.Option(help="A folder of published -C files.")] = None,
    ids: Annotated[Path | None, typer.Option(help="List of the images of ImageNet-C to use (RobustBench's 5,000).")] = None,
    weights: Annotated[Path | None, typer.Option(help="The source network.")] = None,
    posterior: Annotated[Path | None, typer.Option(help="The source posterior, from `petal fit`; PETAL needs it.")] = None,
    network: Annotated[str | None, typer.Option(help="Another network than the recipe's, for example wrn-40-2.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[Literal["auto", "eager"], typer.Option(help="How it is executed; eager is plain torch.")] = "auto",
    fidelity: Annotated[
        Literal["official", "paper"], typer.Option(help="Settings of the released code, or of the paper's text.")
    ] = "official",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="METHOD.OPTION=VALUE, for example petal.ema=0.99; guard.OPTION and "
                                             "small.OPTION too; may be repeated.")
    ] = None,
    plugin: Annotated[Path | None, typer.Option(help="A Python file that adds methods to petal.METHODS.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Batches between checkpoints. Default: about every 20 seconds.")
    ] = None,
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
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
    console = Console(quiet=quiet)
    chosen = recipe(recipe_name)
    fit_threads(chosen)
    if network is not None:
        chosen = replace(chosen, network=network, network_options={})
    extra = {} if plugin is None else {"plugin": load_plugin(plugin)}
    known = apply_settings(rows(chosen, fidelity), settings or [], WRAPPERS)
    table = pick_rows(known, method or TABLE_1)
    jobs = jobs_for(table, numbers(order, "--order") or chosen.numbers, numbers(seed, "--seed") or [0])
    folder = out or Path("runs") / chosen.name
    with shown_warnings(console):
        images_at = open_test(chosen, data, corrupted, ids)
        if chosen.builtin and weights is None and network is None:
            with nullcontext() if ranks is None else ranks.in_turn():
                weights, made = source_on_the_spot(chosen, folder / "source", place, console, quiet)
            posterior = posterior or made
        model = source_network(chosen, weights, place)
        bench = Bench(
            chosen, images_at, model, load_posterior(posterior, model), fidelity, severity, batch_size, images, engine,
            visits, label_correlation, ranks=ranks,
        )  # fmt: skip
        for row in table:
            check_row(bench, row)
        manifest = make_manifest(
            bench, jobs, weights=weights, posterior=posterior, data=data or corrupted, command=command_line(),
            extra=extra,
        )  # fmt: skip
        if ranks is None or ranks.first:
            open_run(folder, manifest)
        run_all(jobs, folder, bench, console, checkpoint_every, quiet, stop_after)
        if ranks is not None:
            ranks.leave()
        if not quiet:
            show_table(folder, console)
        console.print(f"Records are in {folder}; `petal report {folder}` draws them.", markup=False, highlight=False)


def check_row(bench: Bench, row: Row) -> None:
    """Find out that a row cannot be run before an hour went into the others."""
    if needs_posterior(METHODS[row.method]) and bench.posterior is None:
        raise ConfigError(
            f"{row.label} needs the source posterior: make one with `petal fit --recipe {bench.recipe.name} --weights ...`, "
            f"give it as --posterior, or leave {row.name} out with --method"
        )
    bench.adapter(row, 0)


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    bench: Bench,
    console: Console,
    every: int | None,
    quiet: bool,
    stop_after: int | None = None,
) -> None:
    """Run the jobs one after the other, with a line for each that is done and a bar for the one that runs."""
    lengths = {number: len(bench.stream(number)) for number in {job.order for job in jobs}}
    several = len({(job.order, job.seed) for job in jobs}) > 1
    with bar(console, quiet) as progress:
        everything = progress.add_task("all methods", total=sum(lengths[job.order] for job in jobs))
        done = 0
        stop = Countdown(stop_after)
        for job in jobs:
            name = job.row.label + (f", order {job.order}, seed {job.seed}" if several else "")
            task = progress.add_task(name, total=lengths[job.order])
            shown = Shown(progress, task, everything, name, done)
            run_job(job, folder, bench, checkpoint_every=every, progress=shown, stop=stop)
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
        """Whether it has come to its end."""
        return self.left is not None and self.left <= 0


class Shown:
    """A job's progress on the screen."""

    def __init__(self, progress: Bar, task: TaskID, everything: TaskID, name: str, before: int) -> None:
        self.progress, self.task, self.everything, self.name, self.before = progress, task, everything, name, before
        self.error, self.note, self.position = 0.0, "", 0

    def __call__(self, p: Progress) -> None:
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
