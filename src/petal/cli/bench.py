"""`petal bench`: how long steps and corruptions take on this machine."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from petal._files import replacing
from petal.bench import corruptions as corruption_bench
from petal.bench import steps
from petal.cli.common import choose_device, words
from petal.cli.options import command_line, numbers

console = Console()
app = typer.Typer(help="Measure adaptation steps or corruptions on this machine.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this JSON file.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.command("steps")
def bench_steps(
    method: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "petal,cotta,tent,bn",
    engine: Annotated[str, typer.Option(help="Engines: auto, eager.")] = "eager,auto",
    network: Annotated[str, typer.Option(help="Networks, for example wrn-28-10,resnet-50.")] = "small",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "200",
    views: Annotated[str, typer.Option(help="Numbers of views K.")] = "32",
    gate: Annotated[str, typer.Option(help="open (views on every batch), closed (on none), or both.")] = "open,closed",
    batches: Annotated[int, typer.Option(help="Timed batches a row.", min=1)] = 30,
    warmup: Annotated[int, typer.Option(help="Batches before timing; compilation falls into these.", min=1)] = 5,
    parts: Annotated[bool, typer.Option(help="Also time the parts of a step one by one.")] = True,
    device: Device = "auto",
    out: Json = None,
) -> None:
    """Milliseconds a batch, images/s, TFLOP/s, memory and parts of adaptation steps, on synthetic images."""
    where = choose_device(device)
    rows: list[steps.Row] = []
    with console.status("measuring") as status:
        for row in steps.run(
            words(method), words(engine), words(network), numbers([batch], "--batch"), numbers([views], "--views"),
            words(gate), where, count=batches, warmup=warmup, parts=parts, progress=status.update,
        ):  # fmt: skip
            rows.append(row)
            shown = "  ".join(f"{name} {ms:.2f}" for name, ms in row.parts.items())
            console.print(
                f"{row.method} {row.engine} {row.network} batch {row.batch} K {row.views} gate {row.gate}: "
                f"[bold]{row.ms:.2f} ms[/bold] ({row.fastest:.2f} to {row.slowest:.2f})  {shown}"
            )
            _write(out, "steps", [r.to_json() for r in rows])
    console.print(step_table(rows))


@app.command("corruptions")
def bench_corruptions(
    images: Annotated[int, typer.Option(help="How many images.", min=1)] = 10_000,
    size: Annotated[int, typer.Option(help="Side of the images; above 96 the ImageNet profile is used.", min=8)] = 32,
    severity: Annotated[int, typer.Option(min=1, max=5)] = 5,
    device: Device = "auto",
    out: Json = None,
) -> None:
    """Seconds to corrupt a set of images by each of the fifteen corruptions."""
    with console.status("measuring"):
        rows = corruption_bench.run(
            images=images, size=size, severity=severity, device=choose_device(device)
        )  # fmt: skip
    _write(out, "corruptions", [dict(row) for row in rows])
    console.print(corruption_bench.table(rows))


@app.command("page")
def bench_page(
    files: Annotated[list[Path], typer.Argument(metavar="JSON...", help="Files that `petal bench steps --json` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page; its figures go into the folder images beside it.")],
) -> None:
    """Write measured steps as a Markdown page: eager beside fast, parts, and figures against K and batch size."""
    from petal.bench.page import write_page  # matplotlib takes a second to import

    for path in write_page(files, out):
        console.print(f"wrote {path}", highlight=False)


def step_table(rows: list[steps.Row]) -> Table:
    """The rows as a table for the terminal."""
    title = f"Adaptation steps on {rows[0].device}, medians of {rows[0].batches} batches" if rows else None
    table = Table("step", title=title, box=None, pad_edge=False)
    for name in ("ms a batch", "images/s", "TFLOP/s", "of matrix rate", "peak MiB", "warm-up s"):
        table.add_column(name, justify="right")
    for r in rows:
        views = f", K {r.views} {r.gate}" if r.gate != "none" else ""
        table.add_row(
            f"{r.method} {r.engine}, {r.network}, batch {r.batch}{views}", f"{r.ms:.1f}", f"{r.images_per_second:,.0f}",
            f"{r.tflop_per_second:.2f}", f"{r.matrix_share:.0%}", f"{r.peak_mib:,.0f}" if r.peak_mib else "",
            f"{r.warmup_seconds:.1f}",
        )  # fmt: skip
    return table


def _write(path: Path | None, kind: str, rows: list[dict[str, object]]) -> None:
    if path is None:
        return
    content = {"bench": kind, "command": command_line(), "torch": torch.__version__, "rows": rows}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
