"""A batch that fails, or whose loss is not finite, leaves no trace in what comes after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ADAPTING, ENGINES, make, run, same
from networks import images, network


class Failing(torch.optim.SGD):
    """Fails when it is told to, after the gradients were computed and before any weight moved."""

    failing = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if self.failing:
            raise OSError("this step fails")
        return super().step(closure)


def failing(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return Failing(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ADAPTING)
def test_gradients_of_a_batch_that_failed_are_gone(kind: str, engine: str) -> None:
    adapter, twin = (make(kind, engine, optimizer=failing, lr=0.1) for _ in range(2))
    run(adapter, 0), run(twin, 0)
    before = adapter.state_dict()
    adapter.optimizer.failing = True
    with pytest.raises(OSError, match="this step fails"):
        run(adapter, 1)
    assert same(adapter.state_dict(), before)
    adapter.optimizer.failing = False
    assert all(torch.equal(a, b) for a, b in zip(run(adapter, 2, 3), run(twin, 2, 3), strict=True))
    assert same(adapter.state_dict(), twin.state_dict())


class Shifted(petal.Adapter):
    """Its loss is shifted by a constant, of which no gradient knows."""

    shift = 0.0

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)
        self.adapt(dict(self.model.named_parameters()), 0.1)

    def step(self, x: Tensor) -> Tensor:
        logits = self.forward_through(self.model, x)
        self.update(logits.square().mean() + self.shift)
        return logits


@pytest.mark.parametrize("shift", [float("inf"), -float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_is_skipped_though_its_gradients_are_finite(shift: float) -> None:
    adapter, twin = Shifted(network()), Shifted(network())
    run(adapter, 0), run(twin, 0)
    before = twin.state_dict()
    adapter.shift = shift
    run(adapter, 1)
    assert adapter.skipped == 1
    assert same(adapter.state_dict(), before | {"skipped": torch.tensor(1)})
    adapter.shift = 0.0
    assert all(torch.equal(a, b) for a, b in zip(run(adapter, 2, 3), run(twin, 2, 3), strict=True))
    assert (adapter.skipped, twin.skipped) == (1, 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["cotta", "petal"])
def test_so_it_is_in_the_methods_with_a_teacher(kind: str, engine: str) -> None:
    adapter, twin = make(kind, engine), make(kind, engine)
    run(adapter, 0), run(twin, 0)
    loss = adapter.consistency
    adapter.consistency = lambda logits, target: loss(logits, target) + float("inf")
    run(adapter, 1)
    adapter.consistency = loss
    assert (adapter.skipped, float(adapter.restored)) == (1, 0.0)
    after = adapter.state_dict()
    before = twin.state_dict() | {"skipped": torch.tensor(1), "generator": after["generator"]}      # views were drawn
    assert same(after, before)
    twin.load_state_dict(before)
    assert all(torch.equal(a, b) for a, b in zip(run(adapter, 2, 3), run(twin, 2, 3), strict=True))


def far_apart() -> nn.Module:
    """Logits so large that a sum over samples of their differences is beyond float32, and no difference is."""
    model = network()
    with torch.no_grad():
        model.fc.weight.mul_(2e37)
        model.fc.bias.mul_(2e37)
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["cotta", "petal"])
def test_a_consistency_loss_beyond_float32_is_skipped(kind: str, engine: str) -> None:
    """Teacher and student come to name different classes with all certainty."""
    adapter = make(kind, engine, far_apart(), views=0, restore=None)
    x = images()
    adapter(x)
    state = adapter.state_dict()
    for name in ("teacher.fc.weight", "teacher.fc.bias"):
        state[name] = state[name].roll(1, 0)
    adapter.load_state_dict(state)
    target = adapter.teacher(x).softmax(1)
    loss = -(target * adapter.model(x).log_softmax(1)).sum(1).mean()
    gradients = torch.autograd.grad(loss, list(adapter.model.parameters()))
    assert loss.isinf()
    assert all(g.isfinite().all() for g in gradients)
    adapter(x)
    assert adapter.skipped == 1
    assert same(adapter.state_dict(), state | {"skipped": torch.tensor(1)})
