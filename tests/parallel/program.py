"""What the tests do in one process and in several: adapters over the same batches. As a program it is one rank.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=12345 python program.py WHAT OUT
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import petal
from networks import images, network
from petal import parallel
from petal.engine import policy_for

VIEWS = 5
BATCHES = 4
ENGINES = ("eager", "auto", "threads")


class Recolour:
    """An augmentation of the user's own, with random numbers of its own, that counts its calls."""

    def __init__(self) -> None:
        self.generator, self.calls = torch.Generator().manual_seed(3), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * (0.7 + 0.6 * torch.rand(1, 3, 1, 1, generator=self.generator))).clamp(0, 1)


def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x + 0.1 * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def make_petal(**options: object) -> petal.Petal:
    model = network()
    q = petal.DiagonalGaussian.isotropic(model, std=1e-2)
    return petal.Petal(model, q, views=VIEWS, lr=1e-2, **options)


CASES: dict[str, Callable[[], petal.Adapter]] = {
    "petal, some samples": lambda: make_petal(confidence=0.6),
    "petal, own draws for each image": lambda: make_petal(confidence=2, augment=petal.Views(per_sample=True)),
    "petal, two steps": lambda: make_petal(confidence=2, steps=2, restore=petal.Stochastic(0.1)),
    "petal, augment of one's own": lambda: make_petal(confidence=2, augment=Recolour()),
    "petal, augment that takes the generator": lambda: make_petal(confidence=2, augment=drawn),
    "cotta, whole batches": lambda: petal.CoTTA(network(), views=VIEWS, lr=1e-2, confidence=0.56),
    "cotta, transformer": lambda: petal.CoTTA(network("vit"), views=VIEWS, lr=1e-2, confidence=2),
    "petal, float64": lambda: make_petal_64(),
    "petal, guarded": lambda: petal.Guard(make_petal(confidence=2), every=1),
    "petal, small batches": lambda: petal.SmallBatch(make_petal(confidence=2), memory=8, every=8),
    "petal, large batches": lambda: petal.SmallBatch(make_petal(confidence=2), memory=8, large=4, sure=0.5),
}


def make_petal_64() -> petal.Petal:
    model = network(dtype=torch.float64)
    q = petal.DiagonalGaussian.isotropic(model, std=1e-2)
    return petal.Petal(model, q, views=VIEWS, lr=1e-2, confidence=2)


def results(make: Callable[[], petal.Adapter], engine: str, ranks: parallel.Ranks | None = None) -> dict[str, Tensor]:
    """Predictions and final state of an adapter after a few batches, one of them by `predict` alone."""
    adapter = make()
    if ranks is not None:
        petal.parallelize(adapter.method if isinstance(adapter, petal.methods.Wrapper) else adapter, ranks)
    policy = policy_for(adapter.device)
    policy.compile = False
    if engine == "threads":
        engine, policy.view_threads = "auto", 2
    petal.accelerate(adapter, engine, policy=policy)
    out = {}
    for number in range(BATCHES):
        x = images(8, seed=number, dtype=adapter.dtype)
        out[f"answer {number}"] = adapter.predict(x) if number == 2 else adapter(x)
        out[f"views {number}"] = torch.tensor(adapter.views_used)
    if isinstance(adapter.augment, Recolour):
        out["calls"] = torch.tensor(adapter.augment.calls)
    return out | adapter.state_dict()


def compare(ranks: parallel.Ranks, out: Path) -> None:
    found = {f"{n}/{e}": results(make, e, ranks) for n, make in CASES.items() for e in ENGINES}
    torch.save({"results": found, "realigned": ranks.realigned}, out / f"rank-{ranks.rank}.pt")


def trouble(ranks: parallel.Ranks, out: Path) -> None:
    """Weights that drift a little, a lot, or are no numbers; another batch; a rank that dies in the middle of a batch."""
    parallel.CHECK_EVERY = 2
    found: dict[str, object] = {}
    last = ranks.rank == ranks.size - 1
    adapter = petal.parallelize(make_petal(confidence=2), ranks)
    for number in range(3):
        if last and number == 1:
            with torch.no_grad():
                adapter.model.fc.weight.mul_(1 + 1e-5)
        adapter(images(8, seed=number))
    torch.save(adapter.state_dict(), out / f"little-{ranks.rank}.pt")
    found["realigned"] = ranks.realigned
    if last:
        with torch.no_grad():
            adapter.teacher.fc.weight.mul_(2)
    adapter(images(8, seed=3))
    found["a lot"] = error_of(lambda: adapter(images(8, seed=4)))

    adapter = petal.parallelize(make_petal(confidence=2), ranks)
    adapter(images(8))
    found["another batch"] = error_of(lambda: adapter(images(8 - ranks.rank)))

    adapter = petal.parallelize(make_petal(confidence=2), ranks)
    if last:
        with torch.no_grad():
            adapter.teacher.fc.weight[0, 0] = float("nan")
    found["no number"] = error_of(lambda: adapter(images(8)))
    found["realigned in the end"] = ranks.realigned

    adapter = petal.parallelize(make_petal(confidence=2), ranks)
    adapter(images(8))
    before = adapter.state_dict()
    if last:
        adapter.augment, adapter._augment_draws = (lambda x: os._exit(3)), False
    found["lost"] = error_of(lambda: adapter(images(8, seed=1)))
    found["as before"] = all(torch.equal(before[key], value) for key, value in adapter.state_dict().items())
    torch.save(found, out / f"rank-{ranks.rank}.pt")


def error_of(body: Callable[[], object]) -> str:
    try:
        body()
    except parallel.ParallelError as error:
        return str(error)
    return "none"


def threads_of_the_group() -> set[str]:
    """Gloo's threads in this process, where the system tells: those that are left may meet an interpreter that is gone."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return {name for name in names if "gloo" in name or "tcpstore" in name}


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined = parallel.join(timeout=60)
    assert joined is not None
    {"compare": compare, "trouble": trouble}[sys.argv[1]](joined, Path(sys.argv[2]))
    joined.leave()
    assert not (left := threads_of_the_group()), left
