"""A guard around an adapter whose logits are its input times its weights: what student and source say is set by hand."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import petal
from petal import Guard, PetalWarning

CLASSES = 5


class Scripted(petal.Adapter):
    """Learns nothing by itself; `way` is added to its weights at every batch that it learns from."""

    way: Tensor | None = None

    def __init__(self) -> None:
        layer = nn.Linear(CLASSES, CLASSES, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(CLASSES))
        super().__init__(layer, batch_statistics=False)
        self.adapt(dict(self.model.named_parameters()), 0.0)

    def step(self, x: Tensor) -> Tensor:
        logits = self.forward_through(self.model, x)
        if self.way is not None:
            with torch.no_grad():
                self.adapted["weight"].add_(self.way)
        return logits


def guarded(policy: str = "rollback", **options: object) -> Guard:
    return Guard(Scripted(), policy, **({"every": 1, "window": 400} | options))  # type: ignore[arg-type]


def weights(guard: Guard) -> Tensor:
    return guard.adapted["weight"].detach().clone()


def put(guard: Guard, value: Tensor) -> None:
    with torch.no_grad():
        guard.adapted["weight"].copy_(value)


def batch(n: int = 40) -> Tensor:
    """Logits that are sure of a label, all labels alike."""
    return 4.0 * nn.functional.one_hot(torch.arange(n) % CLASSES, CLASSES)


def swapped() -> Tensor:
    """Weights that take class 0 for class 1 and the other way round: two in five labels are others than the source's."""
    return torch.eye(CLASSES)[[1, 0, 2, 3, 4]]


def drive(guard: Guard, count: int, n: int = 40) -> None:
    for _ in range(count):
        guard(batch(n))


@contextmanager
def alarm(guard: Guard) -> Iterator[None]:
    """The block raises one alarm."""
    before = len(guard.alarms)
    with pytest.warns(PetalWarning, match="signs of a collapse"):
        yield
    assert len(guard.alarms) == before + 1


def break_down(guard: Guard, n: int = 40) -> None:
    """An alarm at the next look, whatever was before: weights that are no numbers."""
    put(guard, torch.full((CLASSES, CLASSES), math.nan))
    with alarm(guard):
        drive(guard, 1, n)
