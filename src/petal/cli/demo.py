"""`petal demo`: everything at once, on digits, within minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from petal.cli.common import choose_device
from petal.cli.options import command_line, fit_threads, load_posterior, shown_warnings, source_network, source_on_the_spot
from petal.cli.run import run_all
from petal.data import open_dataset
from petal.recipes import TABLE_1, Bench, jobs_for, make_manifest, open_run, pick_rows, recipe, rows


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/demo"),
    images: Annotated[int | None, typer.Option(min=1, help="Take the first so many images of each domain.")] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="Severity of the corruptions.")] = 5,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """See it work: train a small network on digits, then let the paper's eight methods meet 15 corruptions in a row.

    Needs no data and no network connection, and takes about two minutes. Nothing is staged: these are the numbers.
    """
    from petal import report

    console = Console(quiet=quiet)
    began = time.monotonic()
    chosen = recipe("digits")
    fit_threads(chosen)
    console.print("[bold]Lifelong test-time adaptation on handwritten digits[/]")
    console.print(
        "A small network learns clean digits. Then 15 corruptions arrive one after the other, without labels and without\n"
        "notice; each method predicts every batch as it comes and adapts to it.", highlight=False
    )  # fmt: skip
    with shown_warnings(console):
        device = choose_device("cpu")
        weights, posterior = source_on_the_spot(chosen, out / "source", device, console, quiet)
        model = source_network(chosen, weights, device)
        q = load_posterior(posterior, model)
        bench = Bench(chosen, open_dataset("digits"), model, q, images=images, severity=severity)
        jobs = jobs_for(pick_rows(rows(chosen), TABLE_1), chosen.numbers, [0])
        manifest = make_manifest(bench, jobs, weights=weights, posterior=posterior, data="digits", command=command_line())
        open_run(out, manifest)
        run_all(jobs, out, bench, console, None, quiet)
    loaded = report.load(out)
    console.print()
    console.print(report.terminal(loaded))
    page = report.write_html(loaded, out / "report.html")
    console.print(f"\n{time.monotonic() - began:.0f} s in all. The report with figures:", highlight=False)
    console.print(f"{page.resolve()}", style="bold", highlight=False, soft_wrap=True)
