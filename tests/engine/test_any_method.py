"""Methods that the engine has never heard of run on it, and give what the plain code gives."""

import copy
import gc
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import petal
from networks import images, network
from petal.engine import Policy
from petal.functional import cross_entropy, entropy
from petal.methods.descent import Ema, Pull, PutBack, Quadratic
from petal.methods.mean_teacher import network_with
from petal.methods.network import ViewSource
from petal.norm import RobustNorm, affine_parameters, following

SGD = partial(torch.optim.SGD, momentum=0.9)
POLICIES = {
    "plain": Policy(),
    "threads": Policy(view_threads=2),
    "low precision": Policy(low=torch.bfloat16),                        # on programs, with scaled gradients, as on a GPU
    "compiled": Policy(compile=True, compile_after=1, backend="eager"),
}
TOLERANCE = {"low precision": 0.15}                                     # bfloat16 has 8 binary digits, logits go up to 13


class Filtered(petal.Adapter):
    """Entropy of the certain samples, held by a penalty; a running mean of predictions is declared state."""

    def __init__(self, model: nn.Module, lr: float = 0.01, seed: int = 0, optimizer: Any = SGD) -> None:
        super().__init__(model, batch_statistics=True, seed=seed)
        self.adapt(affine_parameters(self.model), lr, optimizer)
        self.information = {name: torch.ones_like(p) for name, p in self.adapted.items()}
        self.register_state("mean", None)

    def step(self, x: Tensor) -> Tensor:
        logits = self.logits(self.model, x)
        uncertainty = entropy(logits)
        keep = uncertainty.detach() < 0.8 * math.log(logits.shape[1])
        loss = (keep * uncertainty).sum() / keep.sum().clamp(min=1)
        self.descend(loss, [Quadratic(self.information, self.origin(), 0.1)], when=keep.any())
        now = logits.detach().softmax(1).mean(0)
        self.mean = now if self.mean is None else self.mean.lerp(now, 0.1)
        return logits


class TwoForwards(petal.Adapter):
    """A teacher over two views, a student on the batch and on an augmented one, rates by the width of a layer."""

    def __init__(self, model: nn.Module, seed: int = 0, optimizer: Any = SGD, scale: float = 1.0) -> None:
        super().__init__(model, batch_statistics=True, seed=seed)
        rates = {n: scale * (0.05 / p[0].numel() if p.dim() > 1 else 3e-3) for n, p in self.model.named_parameters()}
        self.register_network("teacher", network_with(self.model, None))
        self.adapt(dict(self.model.named_parameters()), rates, optimizer)

    def prediction(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            both = iter((x, x.flip(-1)))
            source = ViewSource(x, lambda _: next(both), 2, self.generator)
            return self.network(self.teacher).over(source, "probs")

    def step(self, x: Tensor) -> Tensor:
        target = self.prediction(x)
        view = petal.Views(per_sample=True)(x, generator=self.generator)
        loss = cross_entropy(self.logits(self.model, x), target) + cross_entropy(self.logits(self.model, view), target)
        self.descend(loss.mean(), after=[Ema(self.teacher, 0.9)])
        return target


class Sharp(petal.Adapter):
    """A step from where the loss is highest nearby, then pulled toward a frozen source that is asked in between."""

    def __init__(self, model: nn.Module, lr: float = 0.01, seed: int = 0, optimizer: Any = SGD, rho: float = 0.05) -> None:
        super().__init__(model, batch_statistics=True, seed=seed)
        self.rho = rho
        self.register_network("anchor", network_with(self.model, None), follows=False)
        self.adapt(affine_parameters(self.model), lr, optimizer)

    def step(self, x: Tensor) -> Tensor:
        logits = self.logits(self.model, x)
        with self.descent.perturbed(entropy(logits).mean(), self.rho):
            features, again = self.features(self.model, x)
            with torch.no_grad():
                anchor = self.logits(self.anchor, x)
            loss = cross_entropy(again, anchor).mean() + 0.01 * features.square().mean()
            self.descend(loss, after=[Pull(self.anchor, 0.1)])
        return logits


class Moving(petal.Adapter):
    """Running statistics of student and teacher that go separate ways."""

    def __init__(self, model: nn.Module, lr: float = 0.01, seed: int = 0, optimizer: Any = SGD) -> None:
        super().__init__(model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, 0.2), seed=seed)
        self.adapt(affine_parameters(self.model), lr, optimizer)
        self.register_network("teacher", network_with(self.model, None))
        self.register_statistics("model")
        self.register_statistics("teacher")

    def prediction(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.logits(self.teacher, x)

    def step(self, x: Tensor) -> Tensor:
        before = self.prediction(x)
        with following(self.model, self.teacher):
            with torch.no_grad():
                target = self.logits(self.teacher, x)
            loss = cross_entropy(self.logits(self.model, x.flip(-1).square()), target).mean()
        self.descend(loss, after=[Ema(self.teacher, 0.9)])
        return before


class Tuned(petal.Petal):
    """A subclass that changes one line of PETAL."""

    def consistency(self, logits: Tensor, target: Tensor) -> Tensor:
        return 2 * super().consistency(logits, target)


def tuned(model: nn.Module, optimizer: Any = SGD) -> petal.Adapter:
    q = petal.DiagonalGaussian.isotropic(model, std=0.05)
    return Tuned(model, q, views=3, confidence=2.0, prior_weight=1e-4, ema=0.9, lr=0.01, optimizer=optimizer)


METHODS = {"filtered": Filtered, "two forwards": TwoForwards, "sharp": Sharp, "moving": Moving, "a subclass": tuned}


def test_what_a_method_makes_anew_for_every_step_is_not_kept() -> None:
    """Such as the mapping that `origin` returns, or a target of its own."""

    class Held(Filtered):
        def step(self, x: Tensor) -> Tensor:
            logits = self.logits(self.model, x)
            target = {name: value.detach() * 0.9 for name, value in self.adapted.items()}
            after = [Pull(target, 0.1), Pull(self.origin(), 0.1)]
            self.descend(entropy(logits).mean(), [Quadratic(self.information, self.origin(), 0.1)], after)
            return logits

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    plain, fast = Held(network()), petal.accelerate(Held(network()), policy=Policy())
    for adapter in (plain, fast):
        for seed in range(20):
            adapter(images(seed=seed))
    before = tensors()
    for seed in range(20, 40):
        assert torch.allclose(plain(images(seed=seed)), fast(images(seed=seed)), atol=5e-4)
    assert tensors() <= before + 3 * len(fast.adapted)          # what is kept of the last steps comes and goes together


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_ones_own_runs_on_the_engine(method: str, policy: str) -> None:
    plain = METHODS[method](network())
    fast = petal.accelerate(METHODS[method](network()), policy=copy.copy(POLICIES[policy]))
    assert fast.executor is not None
    tolerance = TOLERANCE.get(policy, 5e-4)
    start = {key: value.clone() for key, value in plain.weights().items()}
    for seed in range(4):
        expected, got = plain(images(seed=seed)), fast(images(seed=seed))
        assert torch.allclose(expected, got, atol=tolerance), (seed, (expected - got).abs().max())
    assert plain.state_dict().keys() == fast.state_dict().keys()
    assert plain.skipped == fast.skipped == 0
    way = torch.stack([(value - start[key]).norm() for key, value in plain.weights().items()]).norm()
    away = torch.stack([(value - fast.weights()[key]).norm() for key, value in plain.weights().items()]).norm()
    assert away < (0.15 if policy == "low precision" else 1e-3) * way
    plain.load_state_dict(fast.state_dict())
    assert torch.allclose(plain(images(seed=9)), fast(images(seed=9)), atol=tolerance)


@pytest.mark.parametrize("optimizer", [None, SGD])
def test_rates_by_tensor_are_those_of_a_loop_over_tensors(optimizer: Any) -> None:
    """The sweep with a rate for each weight against torch's own optimizer with parameter groups."""
    adapter = petal.accelerate(TwoForwards(network(), optimizer=optimizer), policy=Policy())
    before = {name: p.detach().clone() for name, p in adapter.adapted.items()}
    adapter(images())
    assert adapter.descent.rule is not None
    assert adapter.descent.rates.unique().numel() == 4
    grads = dict(zip(adapter.adapted, adapter.descent.grad_views, strict=True))
    for name, parameter in adapter.adapted.items():
        rate = adapter.lr[name]
        step = rate * grads[name] if optimizer is SGD else rate * grads[name] / (grads[name].abs() + 1e-8)
        assert torch.allclose(before[name] - parameter, step, rtol=1e-3, atol=1e-7), name


def test_two_forwards_wait_in_two_rooms_and_a_third_network_does_not_write_over_them() -> None:
    adapter = petal.accelerate(Sharp(network()), policy=Policy(low=torch.bfloat16))
    adapter(images())
    assert len(adapter.executor.rooms) == 2                             # the anchor's program stays out of the student's
    assert all(room.waiting is None for room in adapter.executor.rooms)
    both = petal.accelerate(TwoForwards(network()), policy=Policy(low=torch.bfloat16))
    both(images())
    rooms = {id(program.room) for program in both.network(both.model).programs.values()}
    assert len(rooms) == 2


def test_gradients_of_two_sizes_add_up_at_one_scale() -> None:
    """Each forward's gradient is scaled to about one before it goes back, by another power of two."""

    class Uneven(petal.Adapter):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model, batch_statistics=True)
            self.adapt(dict(self.model.named_parameters()), 0.01, lambda p, lr: torch.optim.SGD(p, lr=lr))

        def step(self, x: Tensor) -> Tensor:
            logits = self.logits(self.model, x)
            self.descend(1e-6 * entropy(logits).sum() + 10 * entropy(self.logits(self.model, x.flip(-1))).sum())
            return logits

    plain = Uneven(network())
    fast = petal.accelerate(Uneven(network()), policy=Policy(low=torch.bfloat16))
    start = fast.descent.flat.clone()
    plain(images()), fast(images())
    moved = torch.cat([(p - q).flatten() for p, q in zip(plain.adapted.values(), fast.origin().values(), strict=True)])
    assert F.cosine_similarity(fast.descent.flat - start, fast.executor.layout.pack(
        {n: p.detach() for n, p in plain.adapted.items()}) - start, dim=0) > 0.99  # fmt: skip
    assert abs((fast.descent.flat - start).norm() / moved.norm() - 1) < 0.05


def test_a_network_that_leaves_the_range_of_float16_begins_its_step_again(caplog: pytest.LogCaptureFixture) -> None:
    """In bfloat16, with the same random numbers and declared state, and no step counted as skipped."""

    class Drawing(Filtered):
        def step(self, x: Tensor) -> Tensor:
            again = super().step(x + 0.1 * torch.rand(x.shape, generator=self.generator))
            self.seen = self.seen + 1
            return again

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.register_state("seen", torch.zeros(()))

    model = network()
    with torch.no_grad():
        model.fc.weight.mul_(1e5)
    half, brain = (
        petal.accelerate(Drawing(model), policy=Policy(low=low)) for low in (torch.float16, torch.bfloat16)
    )
    for seed in range(3):
        assert torch.equal(half(images(seed=seed)), brain(images(seed=seed)))
    assert torch.equal(half.generator.get_state(), brain.generator.get_state())
    assert (half.skipped, int(half.seen)) == (0, 3)
    assert all(torch.equal(value, brain.state_dict()[key]) for key, value in half.state_dict().items())
    (said,) = caplog.messages
    assert "leaves the range of float16" in said


@pytest.mark.parametrize("asked", [True, False])
def test_a_step_without_anything_to_learn_from_moves_and_counts_nothing(asked: bool) -> None:
    """Neither where the host is asked first, as on a CPU, nor where the device decides, as on a GPU."""
    class Never(Filtered):
        def step(self, x: Tensor) -> Tensor:
            logits = self.logits(self.model, x)
            if self.executor is not None:
                self.executor.cuda = not asked
            made = self.descend(entropy(logits).mean() * float("nan"), when=torch.zeros((), dtype=torch.bool))
            if self.executor is not None:
                self.executor.cuda = False
            assert not made
            return logits

    for policy in (None, *POLICIES.values()):
        adapter = Never(network())
        if policy is not None:
            petal.accelerate(adapter, policy=copy.copy(policy))
        before = {key: value.clone() for key, value in adapter.weights().items()}
        adapter(images())
        assert adapter.skipped == 0
        assert all(torch.equal(value, before[key]) for key, value in adapter.weights().items())


def test_a_teacher_whose_statistics_move_does_not_run_on_the_students() -> None:
    plain, fast = Moving(network()), petal.accelerate(Moving(network()), policy=Policy())
    for seed in range(4):
        plain(images(seed=seed)), fast(images(seed=seed))
    both = [adapter.teacher.get_buffer("norm1.running_mean") for adapter in (plain, fast)]
    assert torch.allclose(*both, atol=1e-5)
    assert (both[0] - plain.model.get_buffer("norm1.running_mean")).abs().max() > 1e-2
    state = fast.state_dict()
    assert torch.equal(state["teacher.norm1.running_mean"], both[1])
    before = fast.predict(images(seed=9))
    assert torch.equal(fast.predict(images(seed=9)), before)         # a prediction moves nothing
    fast.reset()
    assert torch.equal(fast.teacher.get_buffer("norm1.running_mean"), network().norm1.running_mean)


def test_a_restore_of_ones_own_is_given_the_parameters_one_by_one() -> None:
    class OnlyMatrices:
        def masks(self, parameters: Any, generator: torch.Generator) -> list[Tensor]:
            assert all(p.grad is not None for p in parameters)
            return [torch.full_like(p, p.dim() > 1, dtype=torch.bool) for p in parameters]

    class Mine(petal.CoTTA):
        def after(self) -> list[Any]:
            return [Ema(self.teacher, 0.9), PutBack(OnlyMatrices(), self.source)]

    for accelerated in (False, True):
        adapter = Mine(network(), views=0)
        if accelerated:
            petal.accelerate(adapter, policy=Policy())
        for seed in range(2):
            adapter(images(seed=seed))
        for name, p in adapter.model.named_parameters():
            assert torch.equal(p, adapter.source.get_parameter(name)) == (p.dim() > 1), name
        matrices = sum(p.numel() for p in adapter.model.parameters() if p.dim() > 1)
        assert float(adapter.restored) == pytest.approx(matrices / sum(p.numel() for p in adapter.model.parameters()))


def test_weights_changed_by_hand_are_in_the_next_answer() -> None:
    """Copies in low precision are made anew, whoever changed the weights."""
    q = petal.DiagonalGaussian.isotropic(network(), std=0.05)
    adapter = petal.accelerate(petal.Petal(network(), q, views=2, confidence=2.0), policy=Policy(low_views=torch.bfloat16))
    adapter(images())
    with torch.no_grad():
        for p in adapter.teacher.parameters():
            p.zero_()
    assert torch.equal(adapter.predict(images()), adapter.predict(images()).mean(1, keepdim=True).expand(12, 5))


@pytest.mark.parametrize("engine", [False, True])
def test_a_teacher_that_predicts_meanwhile_leaves_the_gradients(engine: bool) -> None:
    """It runs on the student's program and memory, and gradients that wait for their step are in none of it."""
    adapter = petal.CoTTA(network(), views=0)
    if engine:
        petal.accelerate(adapter, policy=Policy())
    x = images()
    adapter(x)
    assert adapter.backward(adapter.logits(adapter.model, x).square().mean())
    before = {name: p.grad.clone() for name, p in adapter.adapted.items()}
    assert any(value.any() for value in before.values())
    with torch.no_grad():
        adapter.logits(adapter.teacher, x)
    assert all(torch.equal(p.grad, before[name]) for name, p in adapter.adapted.items())


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_ones_own_runs_on_a_gpu(method: str) -> None:
    plain, fast = METHODS[method](network().cuda()), petal.accelerate(METHODS[method](network().cuda()))
    for seed in range(6):
        x = images(64, seed=seed).cuda()
        expected, got = plain(x), fast(x)
        assert (expected.softmax(1) - got.softmax(1)).abs().mean() < 0.02
    assert fast.skipped == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_no_graph_of_a_step_outlives_it(compiled: bool) -> None:
    """Nodes that a graph keeps are tied to its stream, and a CUDA graph that is recorded after it would fail."""
    policy = Policy(low=torch.bfloat16, compile=compiled, compile_after=1, backend="eager")
    adapter = petal.accelerate(TwoForwards(network()), policy=policy)
    for size in (8, 8, 5):
        adapter(images(size))
        programs = [p for fast in adapter._networks.values() for p in fast.programs.values()]
        assert programs
        assert not any(tensor.requires_grad for p in programs for result in p.results for tensor in result)
