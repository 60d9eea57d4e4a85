"""How long a step takes, and where: methods x engines x networks x batch sizes x numbers of views.

Inputs are synthetic, so anyone can run it. The gate is forced open or shut by its threshold, since how often it opens is
a matter of data. Times are medians over batches after warm-up, with the device idle before and after each batch.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from petal.collect import collect_statistics
from petal.engine import accelerate
from petal.errors import ConfigError
from petal.methods import METHODS, Adapter
from petal.methods.mean_teacher import MeanTeacher
from petal.methods.network import ViewSource
from petal.models import build, flops
from petal.posterior import DiagonalGaussian
from petal.recipes import WRAPPERS, Row, recipe, rows
from petal.recipes.rows import needs_posterior, needs_statistics, pick_rows, takes_posterior
from petal.source_folder import read_config

NETWORK_INPUT = {"resnet-50": (224, 1000)}  # size and classes; all others are 32 and 10


@dataclass(frozen=True)
class StepTime:
    """One measurement. Times are milliseconds per batch; parts are those of the same step measured one by one."""

    method: str
    engine: str
    network: str
    batch: int
    views: int
    gate: str
    device: str
    batches: int
    ms: float
    fastest: float
    slowest: float
    warmup_seconds: float
    images_per_second: float
    tflop: float
    tflop_per_second: float
    matrix_share: float
    peak_mib: float
    parts: dict[str, float] = field(default_factory=dict)


def run(
    methods: list[str],
    engines: list[str],
    networks: list[str],
    batches: list[int],
    views: list[int],
    gates: list[str],
    device: torch.device,
    count: int = 30,
    warmup: int = 5,
    parts: bool = True,
    compile_at_once: bool = True,
    progress: Callable[[str], None] | None = None,
    source: Path | None = None,
) -> Iterator[StepTime]:
    """Measure every combination. A method without views is measured once, whatever `views` and `gates` say.

    The network of a `source` folder is measured too, with its own weights and shape of images.
    """
    for name in methods:
        if name.partition("+")[0] not in known_rows():
            raise ConfigError(f"unknown method {name!r}: choose from {', '.join(known_rows())}")
    rate = matrix_rate(device)
    known = None if source is None else read_config(source)
    for network in [*networks, *([] if known is None else [known.network])]:
        if known is not None and network == known.network:
            known.check_files()
            model, shape = known.model().to(device), known.input or (3, 32, 32)
        else:
            size, classes = NETWORK_INPUT.get(network, (32, 10))
            model, shape = build(network, classes=classes, seed=0).to(device).eval(), (3, size, size)
        forward = flops(model, shape) / 1e12
        for batch in batches:
            x = torch.rand(batch, *shape, device=device)
            for method in methods:
                for engine in engines:
                    yield from _measure(
                        method, engine, network, model, x, views, gates, forward, rate, count, warmup, parts,
                        compile_at_once, progress,
                    )  # fmt: skip


def _measure(
    method: str, engine: str, network: str, model: nn.Module, x: Tensor, views: list[int], gates: list[str], forward: float,
    rate: float, count: int, warmup: int, parts: bool, compile_at_once: bool, progress: Callable[[str], None] | None,
) -> Iterator[StepTime]:  # fmt: skip
    device = x.device
    _free(device)
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    adapter = make(method, model, x)
    if engine != "eager":
        accelerate(adapter, engine, batch_shape=x.shape if compile_at_once else None)
    settings = [(0, "none")]
    viewing = adapter if isinstance(adapter, MeanTeacher) and adapter.views else None
    if viewing is not None:
        settings = [(k, gate) for k in views for gate in (gates if k else ["closed"])]  # no views, no gate
    for k, gate in settings:
        if progress is not None:
            progress(f"{method} {engine} {network} batch {x.shape[0]} views {k} gate {gate}")
        if viewing is not None:
            viewing.views, viewing.confidence = k, 2.0 if gate == "open" else 0.0
            viewing.gate = "batch"
        if device.type == "cuda":
            torch.cuda.empty_cache()        # what timing the parts of the last row has left
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        for _ in range(max(1, warmup)):
            adapter(x)
        _wait(device)
        warm = time.perf_counter() - started
        times = [_timed(lambda: adapter(x), device) for _ in range(count)]
        peak = (torch.cuda.max_memory_reserved(device) - before) / 2**20 if device.type == "cuda" else 0.0
        ms = statistics.median(times)
        work = forward * x.shape[0] * forwards(adapter)
        yield StepTime(
            method=method, engine=engine, network=network, batch=x.shape[0], views=k, gate=gate, device=device_name(device),
            batches=count, ms=ms, fastest=min(times), slowest=max(times), warmup_seconds=warm,
            images_per_second=x.shape[0] / ms * 1e3, tflop=work, tflop_per_second=work / ms * 1e3,
            matrix_share=work / ms * 1e3 / rate, peak_mib=peak, parts=part_times(adapter, x) if parts else {},
        )  # fmt: skip


def make(method: str, model: nn.Module, x: Tensor) -> Adapter:
    """A row of `petal run cifar10`, such as petal-f+robust, and what it asks to know of the source: made up.

    The posterior is isotropic; statistics are those of the images `x` by the network's own labels.
    """
    (row,) = pick_rows(known_rows(), [method])
    kind: Callable[..., Adapter] = METHODS[row.method]
    options: dict[str, Any] = dict(row.options)
    if takes_posterior(METHODS[row.method]) and needs_posterior(row):
        options["posterior"] = DiagonalGaussian.isotropic(model, std=1e-3, damping=1e-6)
    if needs_statistics(METHODS[row.method]):
        options["statistics"] = collect_statistics(model, [x], labels="predicted")
    adapter = kind(model, **options)
    for name in row.wraps:
        adapter = WRAPPERS[name](adapter)
    return adapter


def known_rows() -> dict[str, Row]:
    """What can be measured, by name: the rows of CIFAR-10, those of plugins among them."""
    return rows(recipe("cifar10"))


def forwards(adapter: Adapter) -> int:
    """Forward passes that a step costs: a backward pass counts as two."""
    if isinstance(adapter, MeanTeacher):
        said = {*adapter.target, *adapter.answer} - {*adapter.students}
        views = 0 if not adapter.views else adapter.views if adapter.confidence > 1 else 1
        return len(said) + 3 * len(adapter.students) + views
    return 1 if adapter.optimizer is None else 3  # an upper bound for TENT, which needs no weight gradients of matrices


def part_times(adapter: Adapter, x: Tensor, count: int = 10) -> dict[str, float]:
    """Milliseconds of the parts of a teacher method's step; those of single networks have none worth showing."""
    if not isinstance(adapter, MeanTeacher):
        return {}
    device = x.device

    def median(body: Callable[[], object]) -> float:
        body()
        return statistics.median(_timed(body, device) for _ in range(count))

    opened = adapter.views and adapter.confidence > 1
    with torch.no_grad():
        source = median(lambda: adapter.logits(adapter.source, x)) if adapter.views else 0.0
        out = {"source": source}
        if opened:
            one = adapter.network(adapter.teacher)
            out["views and teacher"] = median(lambda: one.over(views_of(adapter, x), adapter.average))
        else:
            out["teacher"] = median(lambda: adapter.logits(adapter.teacher, x))
        target = adapter.logits(adapter.teacher, x)
    state = adapter.state_dict()

    def learn() -> None:
        loss = adapter.consistency(adapter.logits(adapter.model, x), target).mean()
        adapter.descend(loss, adapter.penalties(), adapter.after())

    out["student and parameters"] = median(learn)
    adapter.load_state_dict(state)
    return out


def views_of(adapter: MeanTeacher, x: Tensor) -> ViewSource:
    """The views of a batch as a step of the adapter has them."""
    return ViewSource(x, adapter.augment, adapter.views, adapter.generator, adapter.sharing)


def matrix_rate(device: torch.device) -> float:
    """Measured rate of a large matrix product in TFLOP/s: bfloat16 on a GPU, float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    for _ in range(3):
        a @ b
    ms = statistics.median(_timed(lambda: a @ b, device) for _ in range(10))
    return 2 * size**3 / ms / 1e9


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _timed(body: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    body()
    _wait(device)
    return (time.perf_counter() - started) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.compiler.reset()


__all__ = ["StepTime", "make", "matrix_rate", "part_times", "run"]
