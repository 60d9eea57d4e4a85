"""Many steps of an adapter with its checkpoints, and what memory they leave: `python -m long_run petal eager 20000`."""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from inspect import signature
from types import SimpleNamespace

import torch
from torch import Tensor

from networks import images, needed, network
from petal import METHODS, Adapter, DiagonalGaussian, Guard, SmallBatch, accelerate, iter_evaluate
from petal.checkpoint import Checkpoints
from petal.engine import policy_for
from petal.methods.mean_teacher import MeanTeacher


def make(name: str, engine: str) -> Adapter:
    """A method, with what goes around it, as petal+small+guard."""
    method, *around = name.split("+")
    model = network()
    views = {"views": 1, "confidence": 0.9} if issubclass(METHODS[method], MeanTeacher) else {}
    views |= {"views": 2} if method == "memo" else {}
    views |= {"memory": 8} if "memory" in signature(METHODS[method]).parameters else {}
    prior = [DiagonalGaussian.isotropic(model, 0.1)] if method == "petal" else needed(method, model)
    adapter: Adapter = METHODS[method](model, *prior, **views)
    for wrapper in around:
        adapter = SmallBatch(adapter, memory=8, every=1) if wrapper == "small" else Guard(adapter, every=2, window=40)
    policy = policy_for(adapter.device)
    policy.compile = False
    return accelerate(adapter, engine, policy=policy)


def stream(steps: int) -> Iterator[SimpleNamespace]:
    """Batches of changing sizes, domains and values, as they come in service."""
    x = [images(n, seed=n) for n in (4, 4, 4, 3, 4, 6)]
    y: list[Tensor] = [torch.zeros(len(b), dtype=torch.long) for b in x]
    for number in range(steps):
        which = number % len(x)
        yield SimpleNamespace(x=x[which].roll(number, 3), y=y[which], domain=f"domain {number // 100 % 15}", severity=5)


def resident() -> int:
    """Bytes of this process in memory, as the system counts them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def watch(method: str, engine: str, steps: int) -> list[dict[str, int]]:
    """Memory at ten moments, all but the first after caches have filled."""
    out = []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as kept:
        adapter = make(method, engine)
        for number, record in enumerate(iter_evaluate(adapter, stream(steps)), start=1):
            if number % 100 == 0:
                kept.save(adapter, {"position": number, "error": record.error})
            if number % (steps // 10) == 0:
                kept.wait()
                tensors = live_tensors()
                out.append({"step": number, "rss": resident(), "tensors": tensors})
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(watch(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
