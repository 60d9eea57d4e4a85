"""The engine against the plain code: same predictions, same weights, whatever is compiled."""

import copy
import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from networks import NETWORKS, images, needed, network
from petal._threads import Crew
from petal.cli.common import choose_device
from petal.engine import Engine, Policy, keep_freed_memory, passes, policy_for
from petal.engine.flat import Layout
from petal.engine.networks import StoredScale, with_stored_scales
from petal.engine.policy import best_algorithms
from petal.sweep import jobs
from test_golden import CASES, differences

SENSIBLE = [(kind, net) for kind in petal.METHODS for net in NETWORKS if kind != "bn" or net == "batch-norm"]
COMPILED = Policy(compile=True, compile_after=1, view_threads=2)


def make(kind: str, model: nn.Module, **options: object) -> petal.Adapter:
    """Gates that open on every batch: until they do, the gradient is rounding noise (see `Petal`)."""
    if kind == "petal":
        q = petal.DiagonalGaussian.isotropic(model, std=0.05)
        settings = {"views": 4, "confidence": 2.0, "prior_weight": 1e-4, "restore": petal.Fisher(0.1), "ema": 0.9}
        return petal.Petal(model, q, **(settings | options))
    if kind == "cotta":
        return petal.CoTTA(model, **({"views": 4, "confidence": 2.0, "restore": None, "ema": 0.9} | options))
    return petal.METHODS[kind](model, *needed(kind, model), **options)


GATES = ("open", "closed", "mixed")
BATCHES = 5


def gated(kind: str, net: str, gate: str) -> dict[str, object]:
    """The option that opens the gate for all, for none, or for some: samples, or batches where a batch decides as one."""
    if kind not in ("petal", "cotta") or gate == "open":
        return {}
    if gate == "closed":
        return {"confidence": -1.0}
    source = petal.BatchNorm(network(net)) if net == "batch-norm" else petal.Source(network(net))
    sure = torch.stack([source(images(seed=seed)).softmax(1).amax(1) for seed in range(BATCHES)])
    values = (sure.flatten() if kind == "petal" else sure.mean(1)).sort().values
    inner = values[len(values) // 4 : len(values) - len(values) // 4]
    widest = int(inner.diff().argmax())
    assert inner.diff()[widest] > 1e-3, "rounding must not decide"
    limit = float(inner[widest : widest + 2].mean())
    low = (sure < limit).sum(1) if kind == "petal" else (sure.mean(1) < limit).sum()
    assert bool(((low > 0) & (low < (sure.shape[1] if kind == "petal" else BATCHES))).all())
    return {"confidence": limit}


def apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with a teacher that is not the student: while they are the same, the gradient is rounding noise."""
    generator = torch.Generator().manual_seed(1)
    return {
        key: value + 0.2 * value.abs().mean() * torch.randn(value.shape, generator=generator)
        if key.startswith("teacher.") else value
        for key, value in state.items()
    }  # fmt: skip


def far(expected: Tensor, got: Tensor, start: Tensor | None = None, drawn: Tensor | None = None) -> int:
    """How many numbers differ by more than a hundredth of what a number of this tensor moved by (root mean square).

    Both paths round to float32 in another order: a gradient comes out with a relative error of some 1e-6, batch norm's in
    channels-last with ten times that, and so do the moves made of it. A hundredth is a thousand times more, and a
    hundredth of what any mistake in a rate, a decay or a mask would do. To it come four roundings of the largest weight:
    that is what a sum of weight and move can lose. Left out are weights whose gradient (its squares are `drawn`) is 1e-5 of
    the others' or less, such as the bias of attention's keys, which has none: Adam makes full steps of its rounding.
    """
    moved = expected if start is None else expected - start
    limit = 0.01 * moved.square().mean().sqrt() + 2**-22 * expected.abs().max()
    off = (expected - got).abs() > limit
    return int((off if drawn is None else off & (drawn > 1e-10 * drawn.max())).sum())


def strays(wanted: dict[str, Tensor], found: dict[str, Tensor], start: dict[str, Tensor]) -> int:
    """Weights of the student that differ between two states; anything else that differs is an error, with its name."""
    assert wanted.keys() == found.keys()
    student = 0
    for key, value in wanted.items():
        which, _, name = key.partition(".")
        drawn = wanted.get(f"optimizer.state.{name}.exp_avg_sq")
        if which == "model":
            student += far(value, found[key], start[key], drawn)
        elif which == "teacher":
            assert far(value, found[key], start[key], drawn) == 0, key
        elif key.startswith("optimizer.state.") and not key.endswith(".step"):
            assert far(value, found[key]) == 0, key
        elif which == "state" and value.is_floating_point():    # declared by the method: running means and the like
            assert torch.allclose(value, found[key], atol=1e-5), key
        else:
            assert torch.equal(value, found[key]), key          # random state, counters, and the optimizer's settings
    return student


def compare(
    kind: str, net: str, policy: Policy, tolerance: float = 1e-4, gate: str = "open", **options: object
) -> petal.Adapter:
    """The engine against the plain code over some batches: answers, weights, optimizer, counters and random state.

    With a tolerance above 1e-3 (views in low precision) weights and optimizer are compared in the mean only.
    """
    settings = gated(kind, net, gate) | options
    plain = make(kind, network(net), **settings)
    fast = petal.accelerate(make(kind, network(net), **settings), policy=copy.copy(policy))
    start = apart(plain.state_dict())
    plain.load_state_dict(start), fast.load_state_dict(start)
    used = []
    for seed in range(BATCHES):
        expected, got = plain(images(seed=seed)), fast(images(seed=seed))
        assert torch.allclose(expected, got, atol=tolerance), (seed, (expected - got).abs().max())
        assert plain.views_used == fast.views_used
        assert abs(float(plain.restored) - float(fast.restored)) < 2e-3              # two weights of a thousand
        assert (plain.skipped, fast.skipped) == (0, 0)
        used.append(plain.views_used)
        wanted, found = plain.state_dict(), fast.state_dict()
        if tolerance > 1e-3:
            assert wanted.keys() == found.keys()
            assert all((v.double() - found[k].double()).abs().mean() < tolerance for k, v in wanted.items())
            assert torch.equal(wanted["generator"], found["generator"])
        elif student := strays(wanted, found, start):
            # rounding has put two weights on another side of the restore's limit: both go on from the one state
            assert float(plain.restored) > 0
            assert student <= 2, student
            fast.load_state_dict(wanted)
    if kind in ("petal", "cotta") and plain.views:
        assert set(used) == {"open": {True}, "closed": {False}}.get(gate, {True} if kind == "petal" else {True, False})
    return fast


GATED = [(kind, net, gate) for kind, net in SENSIBLE for gate in (GATES if kind in ("petal", "cotta") else GATES[:1])]


@pytest.mark.parametrize(("kind", "net", "gate"), GATED)
def test_agrees_without_compilation(kind: str, net: str, gate: str) -> None:
    compare(kind, net, Policy(), gate=gate)


def repeats_bit_for_bit(policy: Policy) -> None:
    first, second = (petal.accelerate(make("petal", network()), policy=copy.copy(policy)) for _ in range(2))
    for seed in range(4):
        assert torch.equal(first(images(seed=seed)), second(images(seed=seed)))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", ["petal", "tent"])
def test_agrees_compiled(kind: str) -> None:
    for gate in GATES if kind == "petal" else GATES[:1]:  # in the same test, because compiling takes long
        compare(kind, "batch-norm", COMPILED, gate=gate)
    if kind == "petal":
        repeats_bit_for_bit(COMPILED)


@pytest.mark.parametrize(
    "options",
    [{"gate": "sample", "average": "probs"}, {"gate": "batch", "average": "logits"}, {"loss": "symmetric"},
     {"restore": None}, {"restore": petal.Fisher(0)}, {"prior_weight": 0.0}, {"steps": 2}, {"augment": lambda x: x.flip(-1)},
     {"augment": petal.Views(per_sample=True)}],
)  # fmt: skip
def test_agrees_for_every_option(options: dict[str, object]) -> None:
    compare("petal", "batch-norm", Policy(), **options)


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("threads", [1, 2])
def test_views_in_low_precision_leave_the_rest_as_it_is(net: str, threads: int) -> None:
    low, exact = Policy(low_views=torch.bfloat16, view_threads=threads), Policy(view_threads=threads)
    fast = compare("petal", net, low, tolerance=0.06)
    teacher = fast.executor.member(fast.teacher)
    assert torch.equal(teacher.low_flat, teacher.flat.bfloat16())
    one, other = (petal.accelerate(make("petal", network(net)), policy=policy) for policy in (low, exact))
    difference = (one(images()) - other(images())).abs().max()
    assert 1e-5 < difference < 0.06  # bfloat16 has 8 binary digits, and logits go up to 13
    closed = [petal.accelerate(make("petal", network(net), confidence=-1.0), policy=policy) for policy in (low, exact)]
    for seed in range(3):
        assert torch.equal(*(adapter(images(seed=seed)) for adapter in closed))
    assert all(torch.equal(a, b) for a, b in zip(*(adapter.state_dict().values() for adapter in closed), strict=True))


@pytest.mark.parametrize("bad_batch_first", [False, True])
def test_a_network_that_knows_no_low_precision_runs_in_full(
    bad_batch_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def adapter(low: torch.dtype | None) -> petal.Petal:
        model = network()
        model.norm1.register_forward_pre_hook(refuse_bfloat16)
        return petal.accelerate(make("petal", model), policy=Policy(low_views=low, view_threads=2))

    def refuse_bfloat16(layer: nn.Module, x: tuple[Tensor]) -> None:
        if x[0].dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")

    one, other = adapter(torch.bfloat16), adapter(None)
    if bad_batch_first:
        for a in (one, other):
            with pytest.raises(petal.InputError, match="cannot take a batch"):
                a(images()[:, :2])
        assert not caplog.messages
    for seed in range(3):
        assert torch.equal(one(images(seed=seed)), other(images(seed=seed)))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    (said,) = caplog.messages
    assert "float32" in said
    assert "not implemented for 'BFloat16'" in said


def test_a_bad_batch_does_not_end_low_precision() -> None:
    adapter = petal.accelerate(make("petal", network()), policy=Policy(low_views=torch.bfloat16))
    adapter(images())
    source = adapter.network(adapter.source)
    programs = dict(source.programs)
    with pytest.raises(petal.InputError):
        adapter(images()[:, :2])
    assert adapter.executor.low_views == torch.bfloat16
    assert programs.items() <= source.programs.items()


def test_a_cpu_has_views_in_low_precision_if_it_has_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    able: dict[str, bool] = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert policy_for(torch.device("cpu")).low_views is None
    for instructions in ("avx512_bf16", "amx_bf16"):
        able = {instructions: True}
        assert policy_for(torch.device("cpu")).low_views == torch.bfloat16
        assert policy_for(torch.device("cpu")).low is None


def test_no_views_no_augmentation() -> None:
    adapter = petal.accelerate(make("petal", network(), views=0, augment=lambda x: 1 / 0), policy=Policy())
    adapter(images())
    assert not adapter.views_used


def test_a_gate_by_sample_opens_for_the_same_samples() -> None:
    options = {"gate": "sample", "average": "probs", "confidence": 0.5, "lr": 0.0}
    plain = make("petal", network(), **options)
    fast = petal.accelerate(make("petal", network(), **options), policy=Policy())
    for seed in range(3):
        x = images(seed=seed)
        assert 0 < plain.needs_views(x).sum() < len(x)
        assert torch.allclose(plain(x), fast(x), atol=2e-4)


@pytest.mark.parametrize(
    "optimizer",
    [lambda p, lr: torch.optim.SGD(p, lr=lr), lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
     lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True), lambda p, lr: torch.optim.AdamW(p, lr=lr),
     lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.5, 0.9), eps=1e-4), lambda p, lr: torch.optim.RMSprop(p, lr=lr)],
)  # fmt: skip
def test_agrees_for_every_optimizer(optimizer: object) -> None:
    fast = compare("petal", "batch-norm", Policy(), optimizer=optimizer, lr=1e-3)
    plain = make("petal", network(), optimizer=optimizer, lr=1e-3)
    plain.load_state_dict(fast.state_dict())  # the states are of one kind: either continues the other
    assert torch.allclose(plain(images(seed=9)), fast(images(seed=9)), atol=2e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case != "tent"])
def test_golden_steps_in_float64(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's arithmetic is the algorithm's: in float64, which users get eager, it agrees to the last digits."""

    def executed(model: nn.Module, q: petal.DiagonalGaussian) -> petal.Adapter:
        adapter = original(model, q)
        adapter.execute_with(Engine(adapter, Policy()))
        return adapter

    original = CASES[case]
    monkeypatch.setitem(CASES, case, executed)
    logits, weights = differences(case, torch.float64)
    assert max(logits) < 1e-9
    assert weights.max() < 1e-9


@pytest.mark.parametrize("case", ["petal_fim_views", "tent"])
def test_golden_steps_in_float32(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last batch norm rounds ten times more than the other layout: few weights end on another side of γ."""
    original = CASES[case]
    monkeypatch.setitem(CASES, case, lambda model, q: petal.accelerate(original(model, q), policy=Policy()))
    logits, weights = differences(case, torch.float32)
    assert max(logits) < 1e-3
    assert (weights < 1e-4).double().mean() > 0.95


def test_stochastic_restores_its_share() -> None:
    adapter = petal.accelerate(make("cotta", network(), restore=petal.Stochastic(0.3)), policy=Policy())
    adapter(images())
    back = [(p == s).float().flatten() for p, s in zip(adapter.model.parameters(), adapter.source.parameters(), strict=True)]
    assert abs(float(adapter.restored) - 0.3) < 0.05
    assert abs(torch.cat(back).mean() - 0.3) < 0.05
    everything = petal.accelerate(make("petal", network(), restore=petal.Stochastic(1.0)), policy=Policy())
    everything(images())
    pairs = zip(everything.model.parameters(), everything.source.parameters(), strict=True)
    assert all(torch.equal(p, s) for p, s in pairs)


def test_a_shape_is_compiled_when_it_comes_again_and_a_short_batch_is_not() -> None:
    adapter = make("petal", network())
    petal.accelerate(adapter, policy=Policy(compile=True, compile_after=2, backend="eager"))
    for count in (12, 12, 7, 12):
        adapter(images(count))
    assert {tuple(shape) for shape in adapter.executor.compiled} == {(12, 3, 8, 8)}


def test_a_known_batch_shape_is_compiled_at_once_and_no_other() -> None:
    policy = policy_for(torch.device("cpu"), (12, 3, 8, 8))
    policy.backend = "eager"
    adapter = petal.accelerate(make("petal", network()), policy=policy)
    for count in (7, 7, 12):
        adapter(images(count))
    assert {tuple(shape) for shape in adapter.executor.compiled} == ({(12, 3, 8, 8)} if policy.compile else set())


@pytest.mark.parametrize("kind", ["petal", "tent"])
def test_cudnn_tries_its_algorithms_before_it_has_guessed_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN keeps what it guessed for a convolution, in the compiled program too."""
    tried: list[bool] = []
    forward = nn.Conv2d.forward

    def watched(self: nn.Conv2d, x: Tensor) -> Tensor:
        tried.append(torch.backends.cudnn.benchmark)
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)

    def tries(policy: Policy, *sizes: int) -> list[bool]:
        adapter = petal.accelerate(make(kind, network()), policy=policy)
        found = []
        for size in sizes:
            tried.clear()
            adapter(images(size))
            assert len(set(tried)) == 1
            found.append(tried[0])
        return found

    first, other = len(images()), len(images()) + 1
    late = Policy(compile=True, compile_after=100)
    assert tries(late, first, other, first, other) == [True, False, True, True]
    assert tries(Policy(compile=True, shapes=frozenset([images(other).shape])), first) == [False]
    assert tries(Policy(), first) == [False]
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # whoever asked for this wants no choice by the clock
    assert tries(late, first) == [False]


def test_best_algorithms_are_switched_by_the_first_and_the_last_thread() -> None:
    now = torch.backends.cudnn
    first, second = best_algorithms(), best_algorithms()
    with first:
        second.__enter__()
        assert now.benchmark
    assert now.benchmark
    second.__exit__(None, None, None)
    assert not now.benchmark


def test_a_precision_of_the_users_stays_as_it_is() -> None:
    """torch refuses to read its old switch for TF32 once the new one was used."""
    convolutions = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        with best_algorithms():
            assert convolutions.fp32_precision == "ieee"
        assert convolutions.fp32_precision == "ieee"
    finally:
        convolutions.fp32_precision = before


@pytest.mark.parametrize(("views", "streams", "at_once"), [(4, 1, 1), (4, 2, 2), (4, 3, 2), (6, 4, 3), (5, 4, 1), (3, 8, 3)])
@pytest.mark.parametrize("average", ["logits", "probs"])
def test_views_side_by_side_are_the_same_views(views: int, streams: int, at_once: int, average: str) -> None:
    one, several = (
        petal.accelerate(make("petal", network(), views=views, average=average), policy=Policy(view_streams=n))
        for n in (1, streams)
    )
    for seed in range(3):
        assert torch.equal(one(images(seed=seed)), several(images(seed=seed)))
    programs = several.network(several.teacher).programs.values()
    assert [len(program.inputs) for program in programs] == [at_once]


def test_views_may_all_be_made_in_one_tensor() -> None:
    def augment(into: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        numbers = iter(range(1, 100))
        return lambda x: torch.mul(x, 0.1 * next(numbers), out=into)

    one, several = (
        petal.accelerate(make("petal", network(), augment=augment(into)), policy=Policy(view_streams=n))
        for n, into in [(1, None), (4, torch.empty_like(images()))]
    )
    assert torch.equal(one(images()), several(images()))


@pytest.mark.parametrize(("size", "at_once"), [(20, 4), (24, 2)])
def test_large_views_go_two_at_a_time(size: int, at_once: int) -> None:
    adapter = petal.accelerate(make("petal", petal.models.build("small", seed=0)), policy=Policy(view_streams=4))
    adapter(torch.rand(size, 3, 32, 32))
    assert [len(program.inputs) for program in adapter.network(adapter.teacher).programs.values()] == [at_once]


def test_a_changed_setting_takes_effect() -> None:
    adapter = petal.accelerate(make("petal", network()), policy=Policy())
    adapter(images())
    adapter.views = 3
    calls: list[int] = []
    adapter.augment = lambda x: (calls.append(1), x)[1]
    adapter(images())
    assert len(calls) == 3


def test_a_program_that_another_follows_is_gone_at_once() -> None:
    """Its buffers and graphs may be gigabytes, and Python looks for rings of objects only now and then."""
    adapter = petal.accelerate(make("petal", network()), policy=Policy(compile=True, compile_after=2, backend="eager"))
    adapter(images())
    (program,) = adapter.network(adapter.teacher).programs.values()
    old = weakref.ref(program)
    del program
    gc.disable()
    try:
        adapter(images())
        assert old() is None
    finally:
        gc.enable()


def test_back_to_eager_goes_on_from_the_same_state() -> None:
    fast, plain = make("petal", network()), make("petal", network())
    petal.accelerate(fast, policy=Policy())
    for seed in range(3):
        fast(images(seed=seed)), plain(images(seed=seed))
    petal.accelerate(fast, "eager")
    assert fast.executor is None
    assert torch.allclose(fast(images(seed=3)), plain(images(seed=3)), atol=2e-4)


def test_engines_by_name() -> None:
    adapter = make("petal", network())
    assert petal.accelerate(adapter, "auto") is adapter
    assert adapter.executor is not None
    with pytest.raises(petal.ConfigError, match="'auto', 'eager', got 'warp'"):
        petal.accelerate(adapter, "warp")
    double = petal.accelerate(petal.Tent(network(dtype=torch.float64)))
    assert double.executor is None

    class Mine(petal.Tent):
        pass

    assert petal.accelerate(Mine(network())).executor is not None


def test_stored_scales_normalise_as_batch_norm_does_and_share_its_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, 1e-2), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    model[1].weight.data.uniform_(0.5, 2.0)
    model[1].bias.data.normal_()
    x = images() + 3
    kept = model[2]  # with statistics of its own: not this form's business
    kept.running_mean += 1
    for layer in (model[1], model[3]):
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    fast = with_stored_scales(model.eval())
    assert [type(layer) for layer in fast] == [nn.Conv2d, StoredScale, nn.BatchNorm2d, nn.BatchNorm2d]
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    with torch.no_grad():
        model[1].weight.mul_(3.0)
        kept.running_var.mul_(2.0)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    assert type(model[1]) is nn.BatchNorm2d


def test_layout_keeps_names_shapes_and_values() -> None:
    model = network()
    before = {k: v.clone() for k, v in model.named_parameters()}
    flat = Layout.of(before).adopt(model)
    assert flat.numel() == sum(v.numel() for v in before.values())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.data_ptr() >= flat.data_ptr()
    flat.zero_()
    assert all((p == 0).all() for p in model.parameters())
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_rules_that_the_pass_does_not_know_are_left_to_torch() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    rule = passes.Rule.of
    assert rule(torch.optim.Adam(parameters)).kind == "adam"
    assert rule(torch.optim.SGD(parameters, lr=0.1, momentum=0.5)).beta1 == 0.5
    assert rule(torch.optim.Adam(parameters, weight_decay=0.1)) is None
    assert rule(torch.optim.Adam(parameters, amsgrad=True)) is None
    assert rule(torch.optim.AdamW(parameters)) is None
    halves = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1}]
    assert rule(torch.optim.SGD(halves, lr=0.1)).rates == (0.1, 1)
    assert rule(torch.optim.SGD([halves[0], {"params": parameters[1:], "momentum": 0.5}], lr=0.1)) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "net"), SENSIBLE)
def test_agrees_on_a_gpu(kind: str, net: str) -> None:
    """Half precision against float32: close in the mean, and the same labels nearly everywhere."""
    plain = make(kind, network(net).cuda())
    fast = petal.accelerate(make(kind, network(net).cuda()))
    agree: list[Tensor] = []
    for seed in range(6):
        x = images(64, seed=seed).cuda()
        expected, got = plain(x), fast(x)
        assert (expected.softmax(1) - got.softmax(1)).abs().mean() < 0.02
        agree.append((expected.argmax(1) == got.argmax(1)).float().mean())
    assert torch.stack(agree).mean() > 0.95
    state = fast.state_dict()
    nan = images(64).cuda()
    nan[0, 0, 0, 0] = float("nan")
    with pytest.raises(petal.InputError, match="1 of 64"):
        fast(nan)
    assert all(torch.equal(v, state[k]) for k, v in fast.state_dict().items())
    fast(images(5).cuda())
    fast.reset()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equal_networks_have_nothing_to_learn_from_each_other(device: str) -> None:
    """Two ways of rounding must not look like a difference between student and teacher: Adam would make full steps of it."""
    model = petal.models.build("wrn-10-1", classes=10, seed=0).to(device)
    policy = policy_for(torch.device("cuda"))                           # its low precision and options, here on any device
    policy.low, policy.compile_after = torch.bfloat16, 1
    adapter = petal.accelerate(petal.CoTTA(model, views=0), policy=policy)
    adapter(torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device))
    assert not adapter.views_used
    assert adapter.descent.grad.abs().max() < 1e-7                     # by two programs it is 3e-5


@pytest.mark.parametrize("options", [{"average": "probs"}, {"average": "logits"}, {"augment": petal.Views(per_sample=True)}])
def test_views_by_threads_are_the_same_views(options: dict[str, object]) -> None:
    """Draws are made in order and predictions added up in order, whichever thread is first."""
    compare("petal", "batch-norm", Policy(view_threads=3), views=7, **options)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_views_by_threads_repeat_bit_for_bit(low: torch.dtype | None) -> None:
    repeats_bit_for_bit(Policy(low_views=low, view_threads=2))


def test_threads_work_alone_and_leave_the_others_theirs() -> None:
    before = torch.get_num_threads()
    team = Crew(2)
    numbers = iter(range(9))
    results = team.work(lambda: next(numbers), lambda n: torch.tensor([n, torch.get_num_threads()]), 9)
    assert [r.tolist() for r in results] == [[n, 1] for n in range(9)]
    assert torch.get_num_threads() == before


def test_a_view_that_fails_in_a_thread_leaves_the_adapter_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = petal.accelerate(make("petal", network()), policy=Policy(view_threads=2))
    adapter(images())
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    monkeypatch.setattr(petal.Views, "apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapter(images(seed=1))
    after = adapter.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_learning_rate_changed_on_the_way_counts() -> None:
    plain, fast = make("petal", network()), petal.accelerate(make("petal", network()), policy=Policy())
    for seed in range(4):
        if seed == 2:
            for adapter in (plain, fast):
                adapter.optimizer.param_groups[0]["lr"] = 0.02
        assert torch.allclose(plain(images(seed=seed)), fast(images(seed=seed)), atol=1e-3)
    moved = [(a - b).abs().mean().item() for a, b in zip(plain.model.parameters(), fast.model.parameters(), strict=True)]
    assert max(moved) < 2e-3  # the steps are of 0.02


FAULTS = """
import resource, sys, torch
from petal.engine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):                                                       # room for two at a time
    [torch.zeros(12_000_000), torch.zeros(12_000_000)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.zeros(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_kept_is_not_cleared_page_by_page_again() -> None:
    pytest.importorskip("resource")
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")

    def faults(mode: str) -> int:
        command = [sys.executable, "-c", FAULTS, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 10 * 48_000_000 // 4096
    plain = faults("plain")
    assert plain > pages / 600                                           # the system may give pages of two megabytes
    assert faults("keep") < plain / 5


def test_commands_on_a_cpu_and_their_workers_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("petal.cli.common.keep_freed_memory", lambda: called.append("command"))
    monkeypatch.setattr("petal.sweep.jobs.keep_freed_memory", lambda: called.append("worker"))
    assert choose_device("cpu").type == "cpu"
    experiment: Any = SimpleNamespace(chosen=SimpleNamespace(builtin=False), open=lambda device: device)
    for device in ("cpu", "meta"):
        assert jobs.opened_once.__wrapped__(experiment, device) == torch.device(device)
    assert called == ["command", "worker"]


def test_elsewhere_freed_memory_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())           # a C library without mallopt
    assert keep_freed_memory() is False
