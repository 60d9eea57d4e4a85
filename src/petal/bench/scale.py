"""How long a step takes on several ranks: a model from the parts of a step on one, and measurements to hold it against.

Every rank does everything but its share of the views, so with K views on n ranks

    T(n) = rest + ceil(K / n) * view + (K - ceil(K / n)) * draw + exchange        (exchange is 0 for n = 1)

`view` is making a view and the teacher's prediction of it, `draw` the random numbers of a view that another rank makes,
`exchange` the three messages of a step (who is where, the gate, the predictions), `rest` everything else.
"""

import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from petal import parallel
from petal.augment import Views
from petal.bench.steps import NETWORK_INPUT, _timed, make, views_of
from petal.engine import accelerate
from petal.errors import ConfigError
from petal.methods.mean_teacher import MeanTeacher
from petal.models import build


@dataclass(frozen=True)
class StepParts:
    """Milliseconds of what a step with the gate open is made of; `view` and `draw` are for one view."""

    views: int
    rest: float
    view: float
    draw: float = 0.0
    exchange: float = 0.0

    def step(self, ranks: int) -> float:
        """Milliseconds of a step on so many ranks.

        >>> StepParts(views=32, rest=30.0, view=5.0, exchange=1.0).step(1), StepParts(32, 30.0, 5.0, exchange=1.0).step(8)
        (190.0, 51.0)
        """
        share = math.ceil(self.views / ranks)
        return self.rest + share * self.view + (self.views - share) * self.draw + (self.exchange if ranks > 1 else 0.0)


def parts_of(file: Path, setting: "Setting") -> StepParts:
    """From what `petal bench steps --json` measured on one rank, which are neither draws nor messages."""
    from petal.bench.page import read  # matplotlib takes a second to import

    wanted = {"method": setting.method, "network": setting.network, "batch": setting.batch, "views": setting.views,
              "engine": setting.engine, "gate": "open"}  # fmt: skip
    for row in read(file).rows:
        parts = row["parts"]
        shared = parts.get("views and teacher", parts.get("views", 0.0) + parts.get("teacher on views", 0.0))
        if shared and all(row[key] == value for key, value in wanted.items()):
            return StepParts(setting.views, row["ms"] - shared, shared / setting.views)
    told = ", ".join(f"{key} {value}" for key, value in wanted.items())
    raise ConfigError(f"{file} has no row with its parts for {told}")


@dataclass(frozen=True)
class Scale:
    """One number of ranks: milliseconds by the model, and measured where they were."""

    ranks: int
    views_a_rank: int
    model: float
    speedup: float
    measured: float | None = None


def table(parts: StepParts, ranks: list[int], measured: dict[int, float] | None = None) -> list[Scale]:
    """The model for each number of ranks, beside what was measured."""
    for count in ranks:
        if not 1 <= count <= parts.views:
            raise ConfigError(f"{parts.views} views can be shared out over 1 to {parts.views} ranks, not {count}")
    return [
        Scale(n, math.ceil(parts.views / n), parts.step(n), parts.step(1) / parts.step(n), (measured or {}).get(n))
        for n in ranks
    ]


@dataclass(frozen=True)
class Setting:
    """What is measured: a method with K views on every batch, on random images."""

    method: str = "petal"
    network: str = "small"
    batch: int = 200
    views: int = 32
    engine: str = "eager"
    device: str = "cpu"
    batches: int = 10
    threads: int = 1                        # of each rank on a CPU, whatever their number
    busy: bool = False                      # count processor time of rank 0, which does not run while others do

    def adapter(self, device: torch.device, ranks: parallel.Ranks | None = None) -> tuple[MeanTeacher, Tensor]:
        """The adapter, its gate always open, and its batch."""
        size, classes = NETWORK_INPUT.get(self.network, (32, 10))
        shape = (self.batch, 3, size, size)
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
        adapter = make(self.method, build(self.network, classes=classes, seed=0).to(device).eval(), x)
        if not isinstance(adapter, MeanTeacher):
            raise ConfigError(f"{self.method} has no views to share out: choose petal or cotta")
        adapter.views, adapter.confidence = self.views, 2.0
        if ranks is not None:
            parallel.parallelize(adapter, ranks)
        accelerate(adapter, self.engine, batch_shape=shape)
        return adapter, x


def measure(setting: Setting, ranks: list[int], repeat: int = 3) -> tuple[StepParts, dict[int, float]]:
    """The parts on one rank, the exchange between the most ranks, and whole steps on each number of them.

    Times are those of the fastest batches, over `repeat` turns through the numbers of ranks: a machine that is busy with
    other things makes times longer and never shorter.
    """
    if setting.device == "cuda" and setting.busy:
        raise ConfigError("a GPU's work is not processor time: leave out --busy")
    if setting.device == "cuda" and torch.cuda.device_count() < max(ranks):
        raise ConfigError(f"{max(ranks)} ranks need as many GPUs: there are {torch.cuda.device_count()} here")
    steps: dict[int, list[float]] = {n: [] for n in {1, *ranks}}
    single: list[dict[str, float]] = []
    exchange: list[float] = []
    for _ in range(repeat):
        for count in sorted(steps):
            found = _started(setting, count)
            steps[count].append(found["step"])
            if count == 1:
                single.append(found)
            if count == max(steps):
                exchange.append(found["exchange"])
    best = {name: min(found[name] for found in single) for name in single[0]}
    rest = max(0.0, best["step"] - setting.views * best["view"])
    parts = StepParts(setting.views, rest, best["view"], best["draw"], min(exchange))
    return parts, {n: min(times) for n, times in steps.items()}


def _started(setting: Setting, count: int) -> dict[str, float]:
    """Milliseconds on so many ranks, each a fresh process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        spawn(_rank, (count, port, setting, file), nprocs=count)  # type: ignore[no-untyped-call]
        times: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return times


def _rank(rank: int, count: int, port: int, setting: Setting, file: Path) -> None:
    """One rank: the first writes what it measured."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}  # fmt: skip
    device = torch.device("cuda", rank) if setting.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(setting.threads)
    ranks = parallel.join(device)
    adapter, x = setting.adapter(device, ranks)

    def fastest(body: Callable[[], object]) -> float:
        body()
        timed = _processor_time if setting.busy else _timed
        return min(timed(body, device) for _ in range(setting.batches))

    with torch.no_grad():
        adapter(x)
        times = {"step": fastest(lambda: adapter(x)), "exchange": 0.0}
        if ranks is not None:
            times["exchange"] = fastest(lambda: talk(ranks, adapter, x))
        else:
            times["draw"] = fastest(lambda: draw_only(adapter, x))
            times["view"] = fastest(lambda: views_only(adapter, x)) / setting.views
    if rank == 0:
        file.write_text(json.dumps(times), encoding="utf-8")
    if ranks is not None:
        ranks.leave()


def _processor_time(body: Callable[[], object], device: torch.device) -> float:
    started = time.process_time()
    body()
    return (time.process_time() - started) * 1e3


def views_only(adapter: MeanTeacher, x: Tensor) -> None:
    """The views of a batch and the teacher's predictions of them."""
    adapter.network(adapter.teacher).over(views_of(adapter, x), adapter.average)


def draw_only(adapter: MeanTeacher, x: Tensor) -> None:
    """The random numbers of one view."""
    assert isinstance(adapter.augment, Views)
    adapter.augment.skip(x, adapter.generator)


def talk(ranks: parallel.Ranks, adapter: MeanTeacher, x: Tensor) -> None:
    """The messages of one step, with nothing to wait for but each other."""
    ranks.exchange([0.0, 0.0, 0.0])
    needed = ranks.decided(torch.ones(len(x), dtype=torch.bool, device=x.device))
    logits = needed.new_zeros(len(x), classes_of(adapter), dtype=x.dtype)
    ranks.gathered([logits] * sum(ranks.computes(view) for view in range(adapter.views)), adapter.views)


def classes_of(adapter: MeanTeacher) -> int:
    """How many classes the network tells apart: its last parameter is the bias of its last layer."""
    return len(list(adapter.model.parameters())[-1])
