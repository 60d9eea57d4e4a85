"""Restarts: killed under load, asked to stop under load, asked twice."""

import asyncio
import errno
import gc
import http.client
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import petal
from petal import cli
from petal._files import alone
from petal.checkpoint import Checkpoints, digest
from petal.errors import ConfigError
from petal.serve import server as server_module
from petal.serve.http import bound
from petal.serve.settings import Settings
from serve.running import Running, infer_path, json_body

Array = NDArray[np.float32]


SLOW = """
import time
import petal


class Slow(petal.Adapter):
    '''Predicts by the network, moves one bias a little at every step, and takes `seconds` for it.'''

    def __init__(self, model, seconds: float = 0.2):
        super().__init__(model, batch_statistics=False)
        self.seconds = seconds
        name, bias = list(self.model.named_parameters())[-1]
        self.adapt({name: bias}, lr=1e-3)

    def step(self, x):
        time.sleep(self.seconds)
        logits = self.prediction(x)
        self.update(logits.sum())
        return logits.detach()


petal.METHODS["slow"] = Slow
"""


class Load:
    """Threads that send one request after the other, and note how each ended."""

    def __init__(self, server: Running, x: Array, clients: int, once: bool = False) -> None:
        self.server, self.x, self.once = server, x, once
        self.statuses: list[int] = []           # 0: the connection was closed or refused
        self.answered: list[int] = []           # versions that answered, adapted
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(n,)) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, number: int) -> None:
        while not self.stopped.is_set():
            identity = f"{number}-{len(self.statuses)}"
            body = json_body(self.x[number : number + 1], request_id=identity)
            try:
                status, headers, text = self.server.request("POST", infer_path(), body)
            except (OSError, http.client.HTTPException):
                self.statuses.append(0)
                return
            self.statuses.append(status)
            if status == 200:
                answer = json.loads(text)
                assert answer["id"] == identity
                self.answered.append(int(answer["model_version"]))
            else:
                assert status == 503, text
                assert int(headers["retry-after"]) >= 1
                if "shutting down" in text.decode():
                    return
                time.sleep(0.01)
            if self.once:
                return

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)


def checkpointed(folder: Path) -> tuple[str, dict[str, Any]]:
    """Digest and position of the newest checkpoint, read by itself."""
    path = Checkpoints(folder).latest()
    assert path is not None
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if not key.startswith("random.")]
        state = {key: file.get_tensor(key) for key in keys}
        extra = json.loads(file.metadata()["about"])["extra"]
    return digest(state), extra


def until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """No file and no socket is left to the garbage collector."""
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(one.message) for one in told if one.category is ResourceWarning] == []


def test_killed_under_load_it_continues_from_the_last_checkpoint(fresh_folder: Path, x: Array) -> None:
    options = ["--set", "petal.views=1", "--checkpoint-seconds", "0.2", "--snapshot-every", "1000", "--seed", "3"]
    with Running(fresh_folder, options) as one:
        load = Load(one, x, clients=4)
        until(lambda: Checkpoints(fresh_folder).latest() is not None and len(load.answered) > 30)
        one.kill()
        load.join()
    expected, extra = checkpointed(fresh_folder)
    assert 0 < extra["version"] <= max(load.answered) + 1
    with Running(fresh_folder, options) as two:
        assert two.at["resumed"]
        assert two.digest() == {"version": extra["version"], "sha256": expected}
        assert two.infer(x[:4])["model_version"] == str(extra["version"])
        assert two.stop() == 0
    assert checkpointed(fresh_folder)[1]["version"] == extra["version"] + 1


def test_sigterm_under_load_loses_no_accepted_request(fresh_folder: Path, x: Array) -> None:
    """One request a batch: the steps that the last checkpoint tells of are the requests that were let in."""
    options = ["--batch-size", "1", "--queue", "8", "--set", "petal.views=1", "--no-grpc", "--delay-ms", "0"]
    with Running(fresh_folder, options) as one:
        load = Load(one, x, clients=12)
        until(lambda: len(load.answered) > 20)
        began = time.monotonic()
        assert one.stop() == 0
        assert time.monotonic() - began < 30
        load.join()
    _, extra = checkpointed(fresh_folder)
    assert extra["steps"] == load.statuses.count(200)
    assert set(load.statuses) <= {0, 200, 503}
    assert sorted(load.answered) == list(range(extra["steps"])), "each version answered once, in order"
    last = [json.loads(line) for line in (fresh_folder / "audit.jsonl").read_text().splitlines()][-1]
    assert (last["action"], last["version"]) == ("stop", extra["version"])


def test_a_second_sigterm_refuses_what_waits_and_still_checkpoints(fresh_folder: Path, x: Array) -> None:
    config = fresh_folder / "serve.toml"
    (fresh_folder / "slow.py").write_text(SLOW)
    config.write_text(
        'name = "digits"\nrecipe = "digits"\nweights = "source/network.safetensors"\nmethod = "slow"\nplugin = "slow.py"\n'
        'set = ["slow.seconds=0.5"]\nbatch_size = 1\nqueue = 100\ngrpc = false\n'
    )
    with Running(fresh_folder, [str(config)], demo=False) as one:
        load = Load(one, x, clients=20, once=True)
        until(lambda: one.ask("GET", "/api/status")["queue"] > 12)
        one.process.send_signal(signal.SIGTERM)
        until(lambda: one.request("GET", "/v2/health/ready")[0] == 503)
        assert one.request("GET", "/v2/health/live")[0] == 200
        status, headers, _ = one.request("POST", infer_path(), json_body(x[:1]))
        assert (status, headers["retry-after"]) == (503, "5")
        assert one.stop() == 0
        load.join()
    answered = load.statuses.count(200)
    assert load.statuses.count(503) == len(load.statuses) - answered >= 5
    assert checkpointed(fresh_folder)[1]["steps"] == answered


def test_waiting_for_the_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not come to its end is not waited for: what waits is refused, and the server goes."""

    class Stuck:
        waiting, checkpointed, abandoned = 3, 0.0, False

        def is_alive(self) -> bool:
            return True

        def abandon(self) -> None:
            self.abandoned = True

    stuck: Any = Stuck()
    monkeypatch.setattr(server_module, "LAST_SECONDS", 0.1)
    asyncio.run(asyncio.wait_for(server_module._drained(stuck, asyncio.Queue(), 0.1), 10))
    assert stuck.abandoned


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with alone(tmp_path, ""), pytest.raises(ConfigError, match="another server is running"):
        server_module.run(Settings(folder=tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot write to {tmp_path / name}: .*; give another --folder"):
        server_module.run(Settings(folder=tmp_path / name), torch.device("cpu"))


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=f"cannot write to {tmp_path}: No space left on device; give another --folder"):
        server_module.run(Settings(folder=tmp_path), torch.device("cpu"))
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_one_for_the_demo(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot write to {tmp_path / 'file'}: .*; give another --folder"):
        cli.app(["serve", "--demo", "--folder", str(tmp_path / "file")], standalone_mode=False)


@pytest.mark.parametrize("port", ["http_port", "admin_port", "grpc_port"])
def test_a_port_that_is_taken_leaves_nothing_open(fresh_folder: Path, port: str) -> None:
    weights = fresh_folder / "source" / "network.safetensors"
    taken = bound("127.0.0.1", 0)
    ports = {"http_port": 0, "admin_port": 0, "grpc_port": 0, port: taken.getsockname()[1]}
    settings = Settings(folder=fresh_folder, recipe="digits", method="tent", weights=weights, **ports)
    said = f"cannot listen on 127.0.0.1 port {ports[port]}"
    with closing(taken), nothing_left_open(), pytest.raises(ConfigError, match=said):
        server_module.run(settings, torch.device("cpu"))
    assert (fresh_folder / "audit.jsonl").read_text() == "", "it has not started"


def test_a_folder_of_another_source_is_refused(fresh_folder: Path) -> None:
    """Weights that a checkpoint does not belong to: an error that says so, and nothing is overwritten."""
    adapter = petal.Tent(petal.models.build("small", 10, seed=5, width=8))
    with Checkpoints(fresh_folder) as kept:
        kept.save(adapter, {"version": 3, "newest": 3, "steps": 3, "frozen": False})
    before = checkpointed(fresh_folder)
    weights = fresh_folder / "source" / "network.safetensors"
    settings = Settings(folder=fresh_folder, recipe="digits", method="tent", weights=weights)
    with nothing_left_open(), pytest.raises(ConfigError, match="Give another --folder"):
        server_module.run(settings, torch.device("cpu"))
    assert checkpointed(fresh_folder) == before


def test_other_weights_are_noticed_beside_the_same_posterior(fresh_folder: Path) -> None:
    """PETAL starts at the posterior's mean, so that its own checkpoints do not know the weights."""
    weights, q = (fresh_folder / "source" / f"{name}.safetensors" for name in ("network", "posterior"))
    ports = {"http_port": 0, "admin_port": 0, "grpc_port": 0}
    settings = Settings(folder=fresh_folder, recipe="digits", weights=weights, posterior=q, guard="rollback", **ports)

    def started(at: server_module.Addresses) -> None:
        raise AssertionError("it has started")

    with Running(fresh_folder, ["--no-small-batch"]) as one:
        one.ask("POST", "/api/checkpoint")
        assert one.stop() == 0
    content = load_file(weights)
    save_file({k: v + 0.01 if v.ndim == 4 else v for k, v in content.items()}, weights)
    with nothing_left_open(), pytest.raises(ConfigError, match=r"made beside other source weights\. Give another --folder"):
        server_module.run(settings, torch.device("cpu"), started)
