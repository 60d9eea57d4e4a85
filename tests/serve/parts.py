"""A server's parts in this process, around tiny networks: for tests that need no ports."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import petal
from networks import CLASSES, SIZE, images, network
from petal.checkpoint import Checkpoints
from petal.methods import Adapter
from petal.runs.records import distance_from_start
from petal.serve.logs import Audit
from petal.serve.model import Served, inner
from petal.serve.settings import Settings
from petal.serve.versions import Versions
from petal.serve.watch import Metrics, Watch
from petal.serve.worker import Worker

WAIT = 60.0


def tent() -> Adapter:
    return petal.Tent(network(), lr=1e-2)


class Echo(Adapter):
    """Answers each sample with its own first pixels, and counts the samples it adapted to: no two answers are alike."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), batch_statistics=False)
        self.adapt(dict(self.model.named_parameters()), lr=0.0)
        self.batches: list[list[float]] = []

    def step(self, x: Tensor) -> Tensor:
        self.batches.append(x[:, 0, 0, 0].tolist())
        return self.prediction(x)

    def prediction(self, x: Tensor) -> Tensor:
        if bool((x[:, 0, 0, 0] == 0.5).any()):
            raise petal.InputError("one half is not liked")
        if bool((x[:, 0, 0, 0] == 0.25).any()):
            raise RuntimeError("one quarter breaks it")
        return x[:, 0, 0, :CLASSES]


def worker(
    folder: Path, make: Callable[[], Adapter] = tent, adapter: Adapter | None = None, **settings: Any
) -> Worker:
    """A worker that has resumed but not started."""
    adapter = make() if adapter is None else adapter
    chosen = Settings(input=(3, SIZE, SIZE), folder=folder, **({"delay_ms": 0.0, "batch_size": 12} | settings))
    served = Served(
        adapter, petal.Source(network()), make, "test", CLASSES, True, distance_from_start(inner(adapter))
    )
    watch = Watch(Metrics(chosen.batch_size, (("model", "test"),)))
    folder.mkdir(exist_ok=True)
    versions = Versions(folder / "versions", chosen.snapshots)
    out = Worker(served, chosen, watch, Audit(folder / "audit.jsonl"), Checkpoints(folder), versions)
    out.resume()
    return out


def settle(futures: list["Future[Any]"]) -> list[Any]:
    return [future.result(WAIT) for future in futures]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def state(adapter: Adapter) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in adapter.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def sample(value: float, count: int = 1) -> Tensor:
    """Samples whose first row is unlike any other's."""
    x = torch.zeros(count, 3, SIZE, SIZE)
    x[:, 0, 0] = torch.arange(SIZE) / 10_000 + value
    return x


__all__ = ["Echo", "images", "same", "sample", "settle", "state", "tent", "until", "worker"]
