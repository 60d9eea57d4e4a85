"""`petal bench`: how long steps and corruptions take on this machine."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from petal._files import write_json
from petal.bench import corruptions as corruption_bench
from petal.bench import cost, scale, steps
from petal.bench import serve as serve_bench
from petal.cli.common import choose_device, make_console, words
from petal.cli.options import Device, command_line, numbers, with_source
from petal.errors import ConfigError
from petal.recipes import load_plugin
from petal.runs import Experiment

console = make_console()
app = typer.Typer(help="Measure on this machine: adaptation steps, corruptions, the server.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this JSON file.")]


@app.command("steps")
def bench_steps(
    method: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "petal,cotta,tent,bn",
    engine: Annotated[str, typer.Option(help="Engines: auto, eager.")] = "eager,auto",
    network: Annotated[
        str | None, typer.Option(help="Networks, for example wrn-28-10,resnet-50. Default: small, or that of --source.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="A source folder: measure its network, with its weights.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "200",
    views: Annotated[str, typer.Option(help="Numbers of views K.")] = "32",
    gate: Annotated[str, typer.Option(help="open (views on every batch), closed (on none), or both.")] = "open,closed",
    batches: Annotated[int, typer.Option(help="Timed batches per row.", min=1)] = 30,
    warmup: Annotated[int, typer.Option(help="Batches before timing; compilation falls into these.", min=1)] = 5,
    parts: Annotated[bool, typer.Option(help="Also time the parts of a step one by one.")] = True,
    plugin: Annotated[Path | None, typer.Option(help="A Python file that adds methods or networks.")] = None,
    device: Device = "auto",
    out: Json = None,
) -> None:
    """Milliseconds per batch, images/s, TFLOP/s, memory and parts of adaptation steps, on synthetic images."""
    where = choose_device(device)
    if plugin is not None:
        load_plugin(plugin)
    rows: list[steps.StepTime] = []
    with console.status("measuring") as status:
        for row in steps.run(
            words(method), words(engine), words(network or ("" if source else "small")),
            numbers([batch], "--batch"), numbers([views], "--views"), words(gate), where, count=batches, warmup=warmup,
            parts=parts, progress=status.update, source=source,
        ):  # fmt: skip
            rows.append(row)
            shown = "  ".join(f"{name} {ms:.2f}" for name, ms in row.parts.items())
            console.print(
                f"{row.method} {row.engine} {row.network} batch {row.batch} K {row.views} gate {row.gate}: "
                f"[bold]{row.ms:.2f} ms[/bold] ({row.fastest:.2f} to {row.slowest:.2f})  {shown}"
            )
            _write(out, "steps", map(asdict, rows))
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
    _write(out, "corruptions", map(dict, rows))
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


@app.command("scale")
def bench_scale(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to tell the time of, as 1-8.")] = "1-8",
    measure: Annotated[str, typer.Option(help="Numbers of ranks to measure, as many as there are GPUs or cores.")] = "1,2",
    method: Annotated[str, typer.Option(help="petal or cotta.")] = "petal",
    network: Annotated[str, typer.Option(help="A network, for example wrn-28-10.")] = "small",
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 200,
    views: Annotated[int, typer.Option(help="Number of views K.", min=1)] = 32,
    engine: Annotated[str | None, typer.Option(help="auto or eager. Default: auto on a GPU.")] = None,
    batches: Annotated[int, typer.Option(help="Timed batches.", min=1)] = 10,
    repeat: Annotated[int, typer.Option(help="How often each number of ranks is started anew.", min=1)] = 3,
    busy: Annotated[
        bool, typer.Option("--busy", help="Count processor time instead, on a CPU that does other things too: waiting for "
                           "other ranks is left out.")
    ] = False,
    steps_file: Annotated[
        Path | None, typer.Option("--steps", help="Measure nothing: take the parts from this file of `petal bench steps`.")
    ] = None,
    draw_ms: Annotated[float | None, typer.Option(help="Of the random numbers of a view, if not measured.")] = None,
    exchange_ms: Annotated[float | None, typer.Option(help="Of the messages of a step, if not measured.")] = None,
    device: Device = "auto",
    out: Json = None,
) -> None:
    """A step whose views are shared out over ranks: a model from the parts of a step, beside measured times."""
    kind = "cuda" if steps_file is not None and engine is None else choose_device(device).type
    chosen = engine or ("auto" if kind == "cuda" else "eager")
    setting = scale.Setting(method, network, batch, views, chosen, kind, batches, busy=busy)
    measured: dict[int, float] = {}
    if steps_file is not None:
        parts = scale.parts_of(steps_file, setting)
    else:
        with console.status("measuring"):
            parts, measured = scale.measure(setting, numbers([measure], "--measure"), repeat)
    draw = parts.draw if draw_ms is None else draw_ms
    exchange = parts.exchange if exchange_ms is None else exchange_ms
    parts = replace(parts, draw=draw, exchange=exchange)
    rows = scale.table(parts, numbers([ranks], "--ranks"), measured)
    _write(out, "scale", map(asdict, rows))
    console.print(
        f"rest {parts.rest:.2f} ms, a view {parts.view:.2f}, its random numbers {parts.draw:.3f}, "
        f"messages {parts.exchange:.2f}"
    )
    shown = Table("ranks", box=None, pad_edge=False)
    for name in ("views per rank", "model, ms", "measured, ms", "speed-up", "of ideal"):
        shown.add_column(name, justify="right")
    for r in rows:
        shown.add_row(
            str(r.ranks), str(r.views_a_rank), f"{r.model:.1f}", "" if r.measured is None else f"{r.measured:.1f}",
            f"{r.speedup:.2f}", f"{r.speedup / r.ranks:.0%}",
        )  # fmt: skip
    console.print(shown)


@app.command("cost")
def bench_cost(
    figures: Annotated[
        list[str],
        typer.Argument(metavar="NETWORK=FORWARD,STUDENT,CLOSED,OPEN...", help="Milliseconds per batch of a network: a "
                       "forward pass, a step of TENT, a step of PETAL without and with views. wrn-28-10 is required."),
    ],
    out: Json = None,
) -> None:
    """GPU-hours of the paper's whole evaluation, from milliseconds per batch as `petal bench steps` measures them."""
    given: dict[str, cost.Figures] = {}
    for text in figures:
        name, _, values = text.partition("=")
        try:
            given[name] = cost.Figures(*map(float, values.split(",")))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"figures are written NETWORK=FORWARD,STUDENT,CLOSED,OPEN, got {text!r}") from error
    rows = cost.evaluation_cost(given)
    _write(out, "cost", map(asdict, rows))
    shown = Table("benchmark", box=None, pad_edge=False)
    for name in ("runs", "batches per run", "network", "GPU-h, no views", "GPU-h, views on all"):
        shown.add_column(name, justify="right")
    for r in rows:
        how = "measured" if r.measured else "by arithmetic"
        shown.add_row(r.recipe, str(r.runs), f"{r.batches:,}", how, f"{r.least:.2f}", f"{r.most:.2f}")
    total = (f"{sum(hours):.2f}" for hours in zip(*((r.least, r.most) for r in rows), strict=True))
    shown.add_row("all", str(sum(r.runs for r in rows)), "", "", *total)
    console.print(shown)


@app.command("serve")
def bench_serve(
    seconds: Annotated[float, typer.Option(help="Of each load.", min=0.1)] = 5.0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    folder: Annotated[Path, typer.Option(help="Folder for the servers.")] = Path("runs/bench-serve"),
    option: Annotated[list[str] | None, typer.Option(help="Of petal serve, as --queue=25; may be repeated.")] = None,
    out: Json = None,
) -> None:
    """Requests per second and latency of `petal serve --demo` on loopback, against a plain FastAPI handler.

    Single images of 12 kB. The last rows send half as many requests as the adapting server answers, and twice as many.
    """
    weights = with_source(Experiment("digits"), folder / "source", torch.device("cpu"), console).weights
    rows: list[serve_bench.LoadTime] = []
    table = Table("target", "load", title=f"petal serve, {seconds:g} s a row", box=None, pad_edge=False)
    for name in ("answers/s", "p50 ms", "p99 ms", "refused", "p99 of refused", "failed", "wrong"):
        table.add_column(name, justify="right")
    with console.status("measuring") as status:
        for r in serve_bench.run(folder, Path(str(weights)), seconds, clients, option or (), status.update):
            rows.append(r)
            table.add_row(
                r.target, r.load, f"{r.answers_per_second:,.0f}", f"{r.p50:.1f}", f"{r.p99:.1f}", f"{r.refused}",
                f"{r.refused_p99:.1f}" if r.refused else "", f"{r.failed + r.unsent}", f"{r.wrong}",
            )  # fmt: skip
            _write(out, "serve", map(asdict, rows))
    console.print(table)


def step_table(rows: list[steps.StepTime]) -> Table:
    """The rows as a table for the terminal."""
    title = f"Adaptation steps on {rows[0].device}, medians of {rows[0].batches} batches" if rows else None
    table = Table("step", title=title, box=None, pad_edge=False)
    for name in ("ms per batch", "images/s", "TFLOP/s", "of matrix rate", "peak MiB", "warm-up s"):
        table.add_column(name, justify="right")
    for r in rows:
        views = f", K {r.views} {r.gate}" if r.gate != "none" else ""
        table.add_row(
            f"{r.method} {r.engine}, {r.network}, batch {r.batch}{views}", f"{r.ms:.1f}", f"{r.images_per_second:,.0f}",
            f"{r.tflop_per_second:.2f}", f"{r.matrix_share:.0%}", f"{r.peak_mib:,.0f}" if r.peak_mib else "",
            f"{r.warmup_seconds:.1f}",
        )  # fmt: skip
    return table


def _write(path: Path | None, kind: str, rows: Iterable[dict[str, Any]]) -> None:
    if path is None:
        return
    content = {"bench": kind, "command": command_line(), "torch": torch.__version__, "rows": list(rows)}
    write_json(path, content)
