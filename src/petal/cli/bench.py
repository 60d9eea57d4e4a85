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
from petal.bench import serve as serve_bench
from petal.bench import steps
from petal.cli.common import choose_device, words
from petal.cli.options import fit_threads, numbers, source_on_the_spot
from petal.recipes import recipe

console = Console()
app = typer.Typer(help="Measure on this machine: adaptation steps, corruptions, or the server.", no_args_is_help=True)

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


@app.command("serve")
def bench_serve(
    seconds: Annotated[float, typer.Option(help="Of each load.", min=0.1)] = 5.0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    folder: Annotated[Path, typer.Option(help="Folder for the servers.")] = Path("runs/bench-serve"),
    option: Annotated[list[str] | None, typer.Option(help="Of petal serve, as --queue=25; may be repeated.")] = None,
    out: Json = None,
) -> None:
    """Requests a second and latency of `petal serve --demo` on loopback, against a plain FastAPI handler.

    Single images of 12 kB. The last row sends twice as many requests as the adapting server answers.
    """
    fit_threads(recipe("digits"))
    weights, _ = source_on_the_spot(recipe("digits"), folder / "source", torch.device("cpu"), console)
    rows: list[serve_bench.Row] = []
    table = Table("target", "load", title=f"petal serve, {seconds:g} s a row", box=None, pad_edge=False)
    for name in ("answers/s", "p50 ms", "p99 ms", "refused", "p99 of these", "failed", "wrong"):
        table.add_column(name, justify="right")
    with console.status("measuring") as status:
        for r in serve_bench.run(folder, weights, seconds, clients, option or (), status.update):
            rows.append(r)
            table.add_row(
                r.target, r.load, f"{r.answers_per_second:,.0f}", f"{r.p50:.1f}", f"{r.p99:.1f}", f"{r.refused}",
                f"{r.refused_p99:.1f}" if r.refused else "", f"{r.failed + r.unsent}", f"{r.wrong}",
            )  # fmt: skip
            _write(out, "serve", [one.to_json() for one in rows])
    console.print(table)


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
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"bench": kind, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
