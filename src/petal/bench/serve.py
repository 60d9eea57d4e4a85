"""`petal serve` under load from a second process, against the same network in a plain FastAPI handler, in one run."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petal import models
from petal.bench.load import Check, Client, LoadOutcome, binary_requests, id_check
from petal.data import digits
from petal.errors import ConfigError
from petal.recipes import recipe

IMAGES = 256
STARTED = 120.0                             # seconds until a server must be there


@dataclass(frozen=True)
class LoadTime:
    """One load on one target. Times in milliseconds."""

    target: str
    load: str
    answers_per_second: float
    p50: float
    p99: float
    answered: int
    refused: int
    refused_p99: float
    failed: int
    wrong: int
    unsent: int


def row(target: str, load: str, o: LoadOutcome) -> LoadTime:
    """The numbers of an outcome."""
    return LoadTime(
        target, load, o.rate, o.quantile(0.5), o.quantile(0.99), len(o.answered), len(o.refused), o.quantile(0.99, True),
        o.failed, o.wrong, o.unsent,
    )  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Something to send requests to."""

    name: str
    port: int
    path: str
    make: Callable[[int], tuple[bytes, dict[str, str]]]
    check: Check

    def load(self, how: Callable[[Client], Any]) -> LoadOutcome:
        """Put a load on it."""
        outcome: LoadOutcome = asyncio.run(how(Client(self.port, self.path, self.make, self.check)))
        return outcome


def run(
    folder: Path, weights: Path, seconds: float = 5.0, clients: int = 8, options: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[LoadTime]:  # fmt: skip
    """Measure each target alone and with many clients, then at half the capacity of adapting and at twice it.

    `folder` has the demo's source already; `options` go to `petal serve`.
    """
    x: NDArray[np.float32] = digits("test").batch(range(IMAGES))[0].numpy()
    chosen = recipe("digits")
    network = models.build(chosen.network, chosen.classes, weights, **chosen.network_options)
    with torch.inference_mode():
        logits: NDArray[np.float32] = network(torch.from_numpy(x)).numpy()
    progress("starting the servers")
    with petal_server(folder, options) as port, plain_server(weights) as plain:
        infer = "/v2/models/digits/infer"
        adapting = Target("petal serve, adapting", port, infer, binary_requests(x, True), id_check())
        targets = [
            Target("plain FastAPI handler", plain, "/predict", _plain_requests(x), _plain_check(logits)),
            Target("petal serve, source", port, "/v2/models/digits/versions/source/infer", binary_requests(x, True),
                   id_check(logits)),
            Target("petal serve, adapt=false", port, infer, binary_requests(x, False), id_check()),
            adapting,
        ]  # fmt: skip
        for target in targets:
            progress(f"{target.name}: warming up")
            target.load(lambda c: c.closed_loop(4, min(1.0, seconds)))
            progress(f"{target.name}: one client")
            alone = target.load(lambda c: c.closed_loop(1, seconds))
            yield row(target.name, "one client", alone)
            progress(f"{target.name}: {clients} clients")
            full = target.load(lambda c: c.closed_loop(clients, seconds))
            yield row(target.name, f"{clients} clients", full)
        capacity = full.rate                # of the last one, which adapts
        for target in targets[-2:]:         # with learning and without, at the same rate
            progress(f"{target.name}: half the capacity")
            yield row(target.name, f"half of that of adapting ({capacity / 2:.0f}/s)",
                      target.load(lambda c: c.open_loop(capacity / 2, seconds)))  # fmt: skip
        progress("twice the capacity")
        yield row(adapting.name, f"twice that rate ({2 * capacity:.0f}/s)",
                  adapting.load(lambda c: c.open_loop(2 * capacity, seconds)))  # fmt: skip


@contextmanager
def petal_server(folder: Path, options: Sequence[str]) -> Iterator[int]:
    """`petal serve --demo` in a process of its own, from the start; its port."""
    source, folder = folder / "source", folder / "server"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder / "source")
    command = ["serve", "--demo", "--quiet", "--folder", str(folder)]
    command += ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]
    with _process(["-c", "from petal.cli import main; main()", *command, *options], folder) as process:
        _wait(process, lambda: (folder / "serve.json").exists(), folder / "bench.log")
        yield int(json.loads((folder / "serve.json").read_text())["http_port"])


@contextmanager
def plain_server(weights: Path) -> Iterator[int]:
    """The plain handler in a process of its own; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with _process(["-m", "petal.bench.plain", str(port), str(weights)]) as process:
        _wait(process, listens)
        yield port


@contextmanager
def _process(arguments: list[str], folder: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "bench.log" if folder is not None else Path(os.devnull)).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", ready: Callable[[], bool], log: Path | None = None) -> None:
    end = time.monotonic() + STARTED
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            why = "" if log is None else f": see {log}"
            raise ConfigError(f"a server for the measurement did not start{why}")
        time.sleep(0.05)


def _plain_requests(x: NDArray[np.float32]) -> Callable[[int], tuple[bytes, dict[str, str]]]:
    raw = [one.tobytes() for one in x]
    return lambda number: (raw[number % len(raw)], {"X-Id": str(number)})


def _plain_check(logits: NDArray[np.float32]) -> Check:
    def check(number: int, body: bytes) -> bool:
        answer = json.loads(body)
        return answer["id"] == str(number) and bool(np.allclose(answer["logits"], logits[number % len(logits)], atol=1e-3))

    return check
