"""`petal serve`: a network that keeps adapting, behind a port."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from petal.cli.common import choose_device, make_console, words
from petal.cli.options import options_of, shown_warnings, with_source
from petal.errors import ConfigError, StorageError
from petal.runs import Experiment
from petal.serve import Settings, of_source, read_toml


@options_of(Settings, overlay="Default: {}.")
def serve(
    *,
    config: Annotated[Path | None, typer.Argument(metavar="[TOML]", help="Settings, by the names of the options.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the digits network: nothing else is needed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")] = False,
    given: dict[str, Any],
) -> None:
    """Serve a network that keeps adapting, by the Open Inference Protocol (REST and gRPC).

    Settings come from options, from a TOML file, or both; an option is stronger. If the folder has a checkpoint, the server
    continues from it.
    """
    try:
        from petal.serve import http, logs, server  # KServe takes seconds to import, and is there with the extra only
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs its extra: pip install 'petal-tta[serve]' ({error})") from error

    console = make_console(stderr=True)
    chosen = demo_settings() if demo else Settings()
    filed = {} if config is None else read_toml(config)
    source = given["source"] or filed.get("source")
    if source is not None:
        if demo:
            raise ConfigError("--demo makes a source of its own: leave --demo or --source out")
        chosen = chosen.updated(of_source(source))
    chosen = chosen.updated(filed)
    labels = None if given["labels"] is None else words(given["labels"])
    chosen = chosen.updated({**given, "input": _shape(given["input"]), "labels": labels})
    place = choose_device(chosen.device)
    if demo:
        try:
            with shown_warnings(console):
                digits = with_source(Experiment("digits"), chosen.folder / "source", place, console, quiet)
        except StorageError as error:
            raise ConfigError(f"cannot write to {chosen.folder}: {error}; give another --folder") from error
        names = ("weights", "posterior", "statistics")
        found = {name: getattr(chosen, name) or getattr(digits, name) for name in names}
        chosen = chosen.updated(found)
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
        queue=8,        # an image from each of 8 clients that wait for their answers; more would only wait longer on a CPU
        guard="rollback", small_batch=True,
    )  # fmt: skip


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = words(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--input is a shape such as 3,32,32; got {text!r}")
    return tuple(int(part) for part in parts)
