"""A step on a loss, what is added to its gradient and what comes after it, against autograd and hand calculation."""

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ENGINES, make, run
from networks import images, network
from petal.methods.descent import After, Ema, Gaussian, Penalty, Pull, PutBack, Quadratic

LR = 0.1
Terms = Callable[["Steps"], Sequence[Penalty] | Sequence[After]]


def sgd(parameters: object, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


class Steps(petal.Adapter):
    """Goes down the mean square of the logits, with what a test gives it."""

    def __init__(self, penalties: Terms = lambda a: (), after: Terms = lambda a: (), steps: int = 1) -> None:
        super().__init__(network(), batch_statistics=True, steps=steps)
        self.adapt(dict(self.model.named_parameters()), LR, sgd)
        generator = torch.Generator().manual_seed(1)
        self.other = {n: p.detach() + torch.randn(p.shape, generator=generator) for n, p in self.adapted.items()}
        self.positive = {n: torch.rand(p.shape, generator=generator) for n, p in self.adapted.items()}
        self.penalties, self.after = penalties(self), after(self)
        self.when: Tensor | bool = True
        self.factor = 1.0

    def loss(self, x: Tensor) -> Tensor:
        return self.logits(self.model, x).square().mean() * self.factor

    def step(self, x: Tensor) -> Tensor:
        self.descend(self.loss(x), self.penalties, self.after, when=self.when)
        return self.prediction(x)


def values(adapter: petal.Adapter) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in adapter.adapted.items()}


def gradients(adapter: Steps, x: Tensor, term: Callable[[str, Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """By autograd, of the loss and the sum of a term over all parameters."""
    model = copy.deepcopy(adapter.model)
    loss = model(x).square().mean()
    if term is not None:
        loss = loss + sum(term(name, p).sum() for name, p in model.named_parameters())
    return dict(zip(adapter.adapted, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in mine.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["quadratic", "gaussian"])
def test_a_penalty_adds_the_gradient_of_its_term(kind: str, engine: str) -> None:
    made: dict[str, Terms] = {
        "quadratic": lambda a: [Quadratic(a.positive, a.other, 0.3)],
        "gaussian": lambda a: [Gaussian(a.other, a.positive, 0.5, 0.3)],
    }
    adapter = petal.accelerate(Steps(made[kind]), engine)
    far, wide = adapter.other, adapter.positive
    terms: dict[str, Callable[[str, Tensor], Tensor]] = {
        "quadratic": lambda n, p: 0.3 * wide[n] * (p - far[n]).square(),
        "gaussian": lambda n, p: 0.15 * (p - far[n]).square() / (wide[n] + 0.5),
    }
    before = values(adapter)
    expected = gradients(adapter, images(), terms[kind])
    adapter(images())
    assert_same(values(adapter), {n: before[n] - LR * g for n, g in expected.items()})


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_penalty_is_made_of_may_change_between_steps(engine: str) -> None:
    adapter = petal.accelerate(Steps(lambda a: [Quadratic(a.positive, a.other, 0.3)]), engine)
    adapter(images())
    for value in (*adapter.positive.values(), *adapter.other.values()):
        value.mul_(3.0)
    before, far, wide = values(adapter), adapter.other, adapter.positive
    expected = gradients(adapter, images(), lambda n, p: 0.3 * wide[n] * (p - far[n]).square())
    adapter(images())
    assert_same(values(adapter), {n: before[n] - LR * g for n, g in expected.items()})


@pytest.mark.parametrize("engine", ENGINES)
def test_what_comes_after_a_step_works_on_the_new_weights(engine: str) -> None:
    adapter = petal.accelerate(Steps(after=lambda a: [Ema(a.positive, 0.8), Pull(a.other, 0.25)]), engine)
    before, average = values(adapter), {n: v.clone() for n, v in adapter.positive.items()}
    stepped = {n: before[n] - LR * g for n, g in gradients(adapter, images()).items()}
    adapter(images())
    assert_same(values(adapter), {n: 0.75 * v + 0.25 * adapter.other[n] for n, v in stepped.items()})
    assert_same(adapter.positive, {n: 0.8 * average[n] + 0.2 * v for n, v in stepped.items()})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sharpness_aware_step_has_the_gradient_of_the_highest_point_nearby(engine: str) -> None:
    class Sharp(Steps):
        def step(self, x: Tensor) -> Tensor:
            with self.descent.perturbed(self.loss(x), 0.2):
                self.descend(self.loss(x))
            return self.prediction(x)

    adapter = petal.accelerate(Sharp(), engine)
    before, here = values(adapter), gradients(adapter, images())
    length = math.sqrt(sum(float(g.double().square().sum()) for g in here.values()))
    there = Steps()
    with torch.no_grad():
        for name, p in there.adapted.items():
            p.add_(here[name], alpha=0.2 / length)
    expected = gradients(there, images())
    adapter(images())
    assert_same(values(adapter), {n: before[n] - LR * g for n, g in expected.items()})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("why", ["nothing wanted", "not finite"])
def test_without_a_gradient_to_go_by_the_weights_stay_where_they_are(why: str, engine: str) -> None:
    adapter = petal.accelerate(Steps(), engine)
    adapter(images())
    before = values(adapter)
    adapter.factor = math.nan if why == "not finite" else 1.0
    with torch.enable_grad(), adapter.descent.perturbed(adapter.loss(images()), 0.2, when=why == "not finite") as made:
        assert not made
        assert_same(values(adapter), before)
    assert_same(values(adapter), before)
    assert adapter.skipped == (why == "not finite")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_restart_is_at_the_start_and_perhaps_with_a_fresh_optimizer(fresh: bool, engine: str) -> None:
    def adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr)

    def made() -> petal.Adapter:
        return petal.accelerate(make("cotta", net=network(), restore=None, views=0, optimizer=adam), engine)

    adapter, begun = made(), made()
    first = run(begun, 5)
    run(adapter, 0, 1)
    moved, start = values(adapter), {n: v.clone() for n, v in adapter.origin().items()}
    again = adapter._fresh_optimizer if fresh else None
    adapter.descent.restart(start, torch.tensor(False), again)
    assert_same(values(adapter), moved)
    adapter.descent.restart(start, torch.tensor(True), again)
    assert_same(values(adapter), start)
    begun.reset()
    adapter.descent(adapter.logits(adapter.model, images(seed=5)).square().mean())
    begun.descent(begun.logits(begun.model, images(seed=5)).square().mean())
    same_step = all(torch.allclose(p, begun.adapted[n], atol=1e-7) for n, p in adapter.adapted.items())
    assert same_step is fresh
    assert len(first) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_is_not_made_puts_nothing_back_and_is_counted_if_it_was_wanted(engine: str) -> None:
    adapter = petal.accelerate(Steps(after=lambda a: [PutBack(petal.Stochastic(1.0), a.other)]), engine)
    adapter(images())
    assert (float(adapter.restored), adapter.skipped) == (1.0, 0)
    before = values(adapter)
    adapter.when = torch.tensor(False)
    adapter(images())
    assert (float(adapter.restored), adapter.skipped) == (0.0, 0)
    adapter.when, adapter.factor = True, math.inf
    adapter(images())
    assert (float(adapter.restored), adapter.skipped) == (0.0, 1)
    adapter.when = torch.tensor(False)                               # nothing wanted, and nothing finite
    adapter(images())
    assert (float(adapter.restored), adapter.skipped) == (0.0, 1)
    assert_same(values(adapter), before)


@pytest.mark.parametrize("kind", ["tent", "cotta"])
def test_counters_stay_when_the_execution_changes(kind: str) -> None:
    adapter = make(kind)
    run(adapter, 0)
    adapter.skipped, restored = 3, float(adapter.restored)
    for engine in ("auto", "eager"):
        petal.accelerate(adapter, engine)
        assert (adapter.skipped, float(adapter.restored)) == (3, restored)


def test_rates_are_named_as_the_parameters_are() -> None:
    adapter = Steps()
    rates = dict.fromkeys(adapter.adapted, 0.1)
    first = next(iter(rates))
    for wrong in ({n: r for n, r in rates.items() if n != first}, {**rates, "more": 0.1}):
        name = first if first not in wrong else "more"
        with pytest.raises(petal.ConfigError, match=f"lr names other parameters than adapt: {name}"):
            adapter.adapt(dict(adapter.model.named_parameters()), wrong)


def test_features_leave_nothing_behind_in_the_network() -> None:
    adapter = Steps()
    adapter.features(adapter.model, images())
    assert not any(m._forward_pre_hooks for m in adapter.model.modules() if isinstance(m, nn.Linear))
