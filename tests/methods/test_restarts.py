"""Resets that methods decide on, against sums written out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import flat, inputs
from methods.golden import fast, sgd
from networks import images, network
from petal.functional import entropy
from petal.methods.descent import Ema
from petal.methods.mean_teacher import network_with
from petal.methods.resets import Every, LossAverage, restart


def test_a_moving_average_of_losses() -> None:
    level = LossAverage(threshold=0.5, momentum=0.7)
    average, known = torch.tensor(math.inf), None
    for number, loss in enumerate([0.9, 0.3, math.nan, 0.1, 0.4, 0.05]):
        there = number != 4                                                 # no loss in this batch
        average = level.follow(average, torch.tensor(loss), torch.tensor(there))
        if there and not math.isnan(loss):
            known = loss if known is None else 0.7 * known + 0.3 * loss
        assert np.isclose(average, known)
        assert bool(level.collapsed(average)) is (known < 0.5)
    assert known < 0.5


def test_every_so_many_updates_counts_finite_answers() -> None:
    every, count, times = Every(3), torch.zeros((), dtype=torch.int64), []
    for number in range(10):
        logits = torch.full((2, 2), math.nan if number in (1, 2) else 0.0)
        count, due = every.due(count, logits)
        times += [number] * bool(due)
    assert times == [4, 7]                                                  # after the third, sixth finite one
    assert int(count) == 8


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("make", [sgd, torch.optim.Adam])
def test_a_restart_with_and_without_the_optimizers_state(make: Any, optimizer: bool, engine: bool) -> None:
    """With it, Adam's count of steps begins anew too."""
    model, (x, y, *_) = inputs(dtype=torch.float32 if engine else torch.float64)
    adapter = petal.Tent(model, 0.1, optimizer=make)
    start = {name: value.clone() for name, value in adapter.origin().items()}
    if engine:
        fast(adapter)
    adapter(x)
    moved = flat(adapter.adapted)
    restart(adapter, start, torch.tensor(False), optimizer)
    assert torch.equal(flat(adapter.adapted), moved)
    restart(adapter, start, torch.tensor(True), optimizer)
    assert torch.equal(flat(adapter.adapted), flat(start))
    adapter(y)
    fresh = petal.Tent(model, 0.1, optimizer=make)
    fresh(y)
    assert torch.allclose(flat(adapter.adapted), flat(fresh.adapted), atol=1e-5) is optimizer


class Averaged(petal.Adapter):
    """Entropy, and a teacher that follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)
        self.register_network("teacher", network_with(self.model, None))
        self.adapt(dict(self.model.named_parameters()), 0.01, torch.optim.Adam)

    def step(self, x: Tensor) -> Tensor:
        logits = self.logits(self.model, x)
        self.descend(entropy(logits).mean(), after=[Ema(self.teacher, 0.9)])
        return logits


def test_a_restart_where_one_sweep_makes_the_step_and_the_average() -> None:
    """There the engine has the optimizer's state in tensors of its own, and one count of steps for all weights."""
    plain, swept = Averaged(network()), fast(Averaged(network()))
    for adapter in (plain, swept):
        adapter(images(seed=0)), adapter(images(seed=1))
        restart(adapter, adapter.origin(), torch.tensor(True))
        assert all(torch.equal(p, adapter.origin()[name]) for name, p in adapter.adapted.items())
        adapter(images(seed=2))
    for name, p in plain.adapted.items():
        torch.testing.assert_close(swept.adapted[name], p, rtol=1e-3, atol=1e-4, msg=name)
