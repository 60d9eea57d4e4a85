"""All of it in one process, from the start to SIGTERM."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
import uvloop

from petal._files import alone, replacing
from petal.checkpoint import CheckpointError, Checkpoints
from petal.errors import ConfigError
from petal.serve.admin import admin_app, read_token
from petal.serve.http import Server, bound
from petal.serve.logs import Audit
from petal.serve.model import build, warm_up
from petal.serve.rest import public_app
from petal.serve.rpc import Rpc
from petal.serve.settings import Settings
from petal.serve.versions import Versions
from petal.serve.watch import Metrics, Watch
from petal.serve.wire import AdaptiveModel, Plane
from petal.serve.worker import Worker

log = logging.getLogger(__name__)

SWITCH_SECONDS = 2e-4                       # a network of many small layers would keep the ports waiting 5 ms each time
LAST_SECONDS = 4.0                          # for the batch that is being computed and its checkpoint, after the draining


@dataclass(frozen=True)
class Addresses:
    """Where a server that has started can be reached; also written to serve.json in its folder."""

    pid: int
    host: str
    http_port: int
    grpc_port: int | None
    admin_host: str
    admin_port: int
    token_file: str
    resumed: bool
    version: int


def run(settings: Settings, device: torch.device, started: Callable[[Addresses], None] = lambda addresses: None) -> None:
    """Serve until SIGTERM or SIGINT. What was accepted is answered, then a checkpoint is written.

    A second signal stops the waiting: what is still queued is refused with 503, and the checkpoint is written at once.
    """
    with ExitStack() as held:
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
            taken = f"another server is running in {settings.folder}: give another --folder"
            held.enter_context(alone(settings.folder, taken))
            _try_to_write(settings.folder)
        except OSError as error:
            raise ConfigError(f"cannot write to {settings.folder}: {error.strerror}; give another --folder") from error
        served = build(settings, device)
        warm_up(served, settings)
        about = (("model", settings.name), ("method", served.row), ("device", device.type))
        watch = Watch(Metrics(settings.batch_size, about))
        audit = held.enter_context(closing(Audit(settings.folder / "audit.jsonl")))
        versions = Versions(settings.folder / "versions", settings.snapshots)
        worker = Worker(served, settings, watch, audit, Checkpoints(settings.folder), versions)
        watch.metrics.queue_limit.set(settings.waiting)
        watch.metrics.checkpoint_age.set_function(lambda: time.time() - worker.checkpointed)
        try:
            worker.resume()
        except CheckpointError as error:
            raise ConfigError(f"{error}. Give another --folder, or the settings this one was begun with") from error
        token, token_file = read_token(settings)
        sys.setswitchinterval(SWITCH_SECONDS)
        public = held.enter_context(closing(bound(settings.host, settings.http_port)))
        admin = held.enter_context(closing(bound(settings.admin_host, settings.admin_port)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, worker, watch, (public, admin), token, token_file, started))


def _try_to_write(folder: Path) -> None:
    """A full disk is an OSError now and not after the network has been compiled; later on it stops nothing."""
    with TemporaryFile(dir=folder) as file:
        file.write(bytes(2**16))
        file.flush()
        os.fsync(file.fileno())


async def _serve(
    settings: Settings, worker: Worker, watch: Watch, sockets: tuple[socket.socket, socket.socket], token: str,
    token_file: Path, started: Callable[[Addresses], None],
) -> None:  # fmt: skip
    plane = Plane(AdaptiveModel(worker, settings, watch))
    public = Server(public_app(plane, settings, watch.metrics.registry), settings, sockets[0])
    admin = Server(admin_app(plane, settings, token), settings, sockets[1])
    rpc = Rpc(plane, settings) if settings.grpc else None
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    worker.ended = partial(asyncio.get_running_loop().call_soon_threadsafe, signals.put_nowait, 0)
    worker.start()
    tasks = [asyncio.create_task(server.run_until_told()) for server in (public, admin)]
    if rpc is not None:
        await rpc.server.start()
    while not (public.started and admin.started):
        await asyncio.sleep(0.01)
    watch.metrics.ready.set(1)
    addresses = Addresses(
        os.getpid(), settings.host, public.port, None if rpc is None else rpc.port, settings.admin_host, admin.port,
        str(token_file), worker.resumed, worker.version,
    )  # fmt: skip
    with replacing(settings.folder / "serve.json") as temporary:
        temporary.write_text(json.dumps(asdict(addresses), indent=1) + "\n")
    log.info("serving", extra={"http_port": public.port, "admin_port": admin.port, "resumed": worker.resumed})
    started(addresses)

    await signals.get()
    watch.metrics.ready.set(0)
    log.info("draining", extra={"queue": worker.waiting})
    worker.close()
    await _drained(worker, signals, settings.drain_seconds)
    for server in (public, admin):
        server.should_exit = True
    stopping = [] if rpc is None else [rpc.server.stop(grace=2)]
    await asyncio.gather(*tasks, *stopping)
    log.info("stopped", extra={"version": worker.version})
    if worker.lost is not None:
        raise worker.lost


async def _drained(worker: Worker, signals: "asyncio.Queue[int]", seconds: float) -> None:
    """Wait until the worker has answered everything and written its checkpoint; not for ever, and not if told twice."""
    end = time.monotonic() + seconds
    while worker.is_alive() and time.monotonic() < end and signals.empty():
        await asyncio.sleep(0.02)
    if worker.is_alive():
        log.warning("what still waits is refused", extra={"queue": worker.waiting})
        worker.abandon()
        end = time.monotonic() + LAST_SECONDS
        while worker.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)
    if worker.is_alive():
        log.error("the worker did not come to an end: the last checkpoint is %.0f s old", time.time() - worker.checkpointed)
