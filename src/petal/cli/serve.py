"""`petal serve`: a network that keeps adapting, behind a port."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from petal.cli.common import choose_device, words
from petal.cli.options import fit_threads, shown_warnings, source_on_the_spot
from petal.errors import ConfigError, StorageError
from petal.recipes import recipe
from petal.serve import Settings, read_toml


def _panel(panel: str) -> Callable[..., Any]:
    """Options shown together in the help."""
    return lambda text, *names: typer.Option(*names, help=text, rich_help_panel=panel)


_model, _adapt, _batch = _panel("Model"), _panel("Adaptation"), _panel("Batches")
_limit, _port, _state = _panel("Limits"), _panel("Ports"), _panel("State")


def serve(
    config: Annotated[Path | None, typer.Argument(metavar="[TOML]", help="Settings, by the names of the options.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the digits network: nothing else is needed.")] = False,
    name: Annotated[str | None, _model("Name of the model in the address.")] = None,
    recipe_name: Annotated[str | None, _model("Network and method settings of cifar10, ...", "--recipe")] = None,
    network: Annotated[str | None, _model("A network by name, for example wrn-40-2.")] = None,
    classes: Annotated[int | None, _model("How many classes it has.")] = None,
    shape: Annotated[str | None, _model("Shape of a sample. Default: 3,32,32.", "--input")] = None,
    labels: Annotated[str | None, _model("Names of the classes, with commas.")] = None,
    weights: Annotated[Path | None, _model("The source network.")] = None,
    posterior: Annotated[Path | None, _model("The source posterior, from `petal fit`; PETAL needs it.")] = None,
    method: Annotated[str | None, _adapt("petal, cotta, tent, ... Default: petal.", "--method", "-m")] = None,
    fidelity: Annotated[Literal["official", "paper"] | None, _adapt("Of the recipe's settings.")] = None,
    settings: Annotated[list[str] | None, _adapt("METHOD.OPTION=VALUE; may be repeated.", "--set")] = None,
    plugin: Annotated[Path | None, _adapt("A Python file that adds methods to petal.METHODS.")] = None,
    seed: Annotated[int | None, _adapt("Of the method's random numbers.")] = None,
    guard: Annotated[str | None, _adapt("Policy of the guard, for example rollback.")] = None,
    guard_set: Annotated[list[str] | None, _adapt("OPTION=VALUE of the guard; may be repeated.")] = None,
    small_batch: Annotated[
        bool | None, _adapt("Mode for few samples at a time.", "--small-batch/--no-small-batch")
    ] = None,
    device: Annotated[str | None, _adapt("auto, cpu or cuda.")] = None,
    engine: Annotated[Literal["auto", "eager"] | None, _adapt("How it is executed. Default: auto.")] = None,
    batch_size: Annotated[int | None, _batch("Samples a batch. Default: 50.")] = None,
    delay_ms: Annotated[float | None, _batch("How long a request waits for others. Default: 10.")] = None,
    queue: Annotated[int | None, _batch("Samples that may wait. Default: a batch.")] = None,
    request_samples: Annotated[int | None, _limit("Samples a request. Default: a batch.")] = None,
    max_body: Annotated[int | None, _limit("Bytes a request. Default: what its samples may take.")] = None,
    max_pixels: Annotated[int | None, _limit("Pixels of a request's images. Default: 2^24.")] = None,
    resize: Annotated[bool | None, _limit("Scale images of another size, or refuse them.", "--resize/--no-resize")] = None,
    connections: Annotated[int | None, _limit("At once. Default: 256.")] = None,
    read_seconds: Annotated[float | None, _limit("For the head of a request, and for its body. Default: 10.")] = None,
    idle_seconds: Annotated[float | None, _limit("Between requests. Default: 65.")] = None,
    answer_seconds: Annotated[float | None, _limit("From acceptance to answer. Default: 30.")] = None,
    drain_seconds: Annotated[float | None, _limit("After SIGTERM, for what was accepted. Default: 20.")] = None,
    host: Annotated[str | None, _port("Default: 127.0.0.1; 0.0.0.0 lets everybody in.")] = None,
    http_port: Annotated[int | None, _port("REST and /metrics. Default: 8080.")] = None,
    grpc: Annotated[bool | None, _port("Serve gRPC too.", "--grpc/--no-grpc")] = None,
    grpc_port: Annotated[int | None, _port("Default: 8081.")] = None,
    admin_host: Annotated[str | None, _port("Default: 127.0.0.1.")] = None,
    admin_port: Annotated[int | None, _port("Default: 8082.")] = None,
    token_file: Annotated[Path | None, _port("File with the admin token. Default: made in the folder.")] = None,
    folder: Annotated[Path | None, _state("Checkpoints, versions, audit log, token. Default: runs/serve.")] = None,
    checkpoint_seconds: Annotated[float | None, _state("Between checkpoints. Default: 30.")] = None,
    snapshot_every: Annotated[int | None, _state("Adapting batches between versions. Default: 200.")] = None,
    snapshots: Annotated[int | None, _state("Versions that are kept. Default: 5.")] = None,
    compare_seconds: Annotated[float | None, _state("Between comparisons with the source. Default: 0.5.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
) -> None:
    """Serve a network that keeps adapting, by the Open Inference Protocol (REST and gRPC).

    Settings come from options, from a TOML file, or both; an option is stronger. If the folder has a checkpoint, the server
    continues from it.
    """
    given: dict[str, Any] = {
        "name": name, "recipe": recipe_name, "network": network, "classes": classes, "input": _shape(shape),
        "labels": None if labels is None else words(labels), "weights": weights, "posterior": posterior, "method": method,
        "fidelity": fidelity, "set": settings, "plugin": plugin, "seed": seed, "guard": guard, "guard_set": guard_set,
        "small_batch": small_batch, "device": device, "engine": engine, "batch_size": batch_size, "delay_ms": delay_ms,
        "queue": queue, "request_samples": request_samples, "max_body": max_body, "max_pixels": max_pixels,
        "resize": resize, "connections": connections, "read_seconds": read_seconds, "idle_seconds": idle_seconds,
        "answer_seconds": answer_seconds, "drain_seconds": drain_seconds, "host": host, "http_port": http_port,
        "grpc": grpc, "grpc_port": grpc_port, "admin_host": admin_host, "admin_port": admin_port,
        "token_file": token_file, "folder": folder, "checkpoint_seconds": checkpoint_seconds,
        "snapshot_every": snapshot_every, "snapshots": snapshots, "compare_seconds": compare_seconds,
    }  # fmt: skip
    try:
        from petal.serve import http, logs, server  # KServe takes seconds to import, and is there with the extra only
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs its extra: pip install 'petal-tta[serve]' ({error})") from error

    console = Console(stderr=True)
    chosen = demo_settings() if demo else Settings()
    if config is not None:
        chosen = chosen.updated(read_toml(config))
    chosen = chosen.updated(given)
    place = choose_device(chosen.device)
    if demo:
        fit_threads(recipe("digits"))
        try:
            with shown_warnings(console):
                found = source_on_the_spot(recipe("digits"), chosen.folder / "source", place, console, quiet)
        except StorageError as error:
            raise ConfigError(f"cannot write to {chosen.folder}: {error}; give another --folder") from error
        chosen = chosen.updated({"weights": chosen.weights or found[0], "posterior": chosen.posterior or found[1]})
    logs.configure(logging.WARNING if quiet else logging.INFO)

    def started(at: server.Addresses) -> None:
        where = f"http://{http.address(at.host, at.http_port)}/v2/models/{chosen.name}"
        grpc_at = "" if at.grpc_port is None else f", gRPC on port {at.grpc_port}"
        print(f"serving {where}{grpc_at}", flush=True)
        page = f"http://{http.address(at.admin_host, at.admin_port)}/"
        print(f"live page {page} with the token in {at.token_file}", flush=True)

    server.run(chosen, place, started)


def demo_settings() -> Settings:
    """The digits network, watched by a guard, for single images as well as whole batches."""
    return Settings(
        name="digits", recipe="digits", labels=tuple("0123456789"), folder=Path("runs/serve-demo"), snapshot_every=50,
        queue=6,                            # on a CPU a larger batch takes longer, and those who wait should not wait long
        guard="rollback", small_batch=True,
    )  # fmt: skip


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = words(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--input is a shape such as 3,32,32; got {text!r}")
    return tuple(int(part) for part in parts)
