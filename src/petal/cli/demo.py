"""`petal demo`: everything at once, on digits, within minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer

from petal.cli.common import choose_device, make_console
from petal.cli.options import Quiet, command_line, shown_warnings, with_source
from petal.cli.run import run_all
from petal.recipes import TABLE_1
from petal.runs import Experiment, jobs_for, make_manifest, open_run


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/demo"),
    images: Annotated[int | None, typer.Option(min=1, help="Take the first so many images of each domain.")] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="Severity of the corruptions.")] = 5,
    quiet: Quiet = False,
) -> None:
    """See it work: train a small network on digits, then let nine methods meet 15 corruptions in a row.

    Needs no data and no network connection, and takes about two minutes. Nothing is staged: these are the numbers.
    """
    from petal import report

    console = make_console(quiet=quiet)
    began = time.monotonic()
    experiment = Experiment("digits", data="digits", images=images, severity=severity)
    console.print("[bold]Lifelong test-time adaptation on handwritten digits[/]")
    console.print(
        "A small network learns clean digits. Then 15 corruptions arrive one after the other, without labels and without "
        "notice; each method predicts every batch as it comes and adapts to it.", highlight=False
    )  # fmt: skip
    with shown_warnings(console):
        device = choose_device("cpu")
        opened = with_source(experiment, out / "source", device, console, quiet).open(device)
        jobs = jobs_for(experiment.rows([*TABLE_1, "petal-f"]), experiment.chosen.numbers, [0])
        open_run(out, make_manifest(opened, jobs, command_line()))
        run_all(jobs, out, opened, console, None, quiet)
    loaded = report.load(out)
    console.print()
    console.print(report.terminal(loaded))
    page = report.write_html(loaded, out / "report.html")
    console.print(f"\n{time.monotonic() - began:.0f} s in all. The report with figures:", highlight=False)
    console.print(f"{page.resolve()}", style="bold", highlight=False, soft_wrap=True)
