"""An adapter is a module like others: copies, files, other processes, threads, and the network taken out of it."""

import copy
import io
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ENGINES, make, run, same
from networks import ConvNet, images, needed, network
from petal.engine import Policy
from petal.methods.descent import Descent


def pickled(adapter: petal.Adapter) -> petal.Adapter:
    return pickle.loads(pickle.dumps(adapter))  # type: ignore[no-any-return]


def saved(adapter: petal.Adapter) -> petal.Adapter:
    file = io.BytesIO()
    torch.save(adapter, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}
AROUND: dict[str, Callable[[petal.Adapter], petal.Adapter]] = {
    "guard": lambda a: petal.Guard(a, every=2, window=24),
    "small": lambda a: petal.SmallBatch(a, memory=12, every=12),
    "small+guard": lambda a: petal.Guard(petal.SmallBatch(a, memory=12, every=12), every=2, window=24),
}


def goes_on(adapter: petal.Adapter, twin: petal.Adapter, way: Callable[[petal.Adapter], petal.Adapter]) -> None:
    """The copy goes on as the original, which does not notice, and as one that was never copied."""
    for one in (adapter, twin):
        run(one, 1, 2, 3)
    other = way(adapter)
    assert type(other) is type(adapter)
    assert same(other.state_dict(), adapter.state_dict())
    ours = run(other, 4, 5, 6)
    assert torch.equal(other.predict(images()), other.predict(images()))
    theirs, expected = run(adapter, 4, 5, 6), run(twin, 4, 5, 6)
    assert all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(ours, theirs, expected, strict=True))
    assert same(other.state_dict(), adapter.state_dict())
    assert same(adapter.state_dict(), twin.state_dict())
    for one in (other, adapter):
        one.reset()
    assert all(torch.equal(a, b) for a, b in zip(run(other, 1, 2), run(adapter, 1, 2), strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", petal.METHODS)
def test_a_copy_goes_on_to_the_bit(kind: str, engine: str, way: str) -> None:
    options = {"every": 12} if kind in ("note", "rotta") else {}
    goes_on(make(kind, engine, **options), make(kind, engine, **options), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("around", AROUND)
def test_what_goes_around_a_method_is_copied_with_it(around: str, engine: str, way: str) -> None:
    adapter, twin = (AROUND[around](make("petal", engine)) for _ in range(2))
    goes_on(adapter, twin, WAYS[way])


def test_the_copy_makes_its_own_engine_with_the_same_choices() -> None:
    adapter = petal.Petal(network(), views=2, confidence=2.0, prior_weight=0)
    petal.accelerate(adapter, policy=Policy(compile=True, compile_after=2, backend="eager"))
    run(adapter, 1, 2)
    for way in WAYS.values():
        other = way(adapter)
        ours, theirs = other.executor, adapter.executor
        assert ours is not theirs
        assert ours.adapter is other
        assert (ours.compiled, ours.seen) == (theirs.compiled, theirs.seen)
        assert ours.compiled == {torch.Size([12, 3, 8, 8])}
        weights = other.model.get_parameter("fc.weight")
        assert weights.untyped_storage().data_ptr() == ours.member(other.model).flat.untyped_storage().data_ptr()
        assert weights.data_ptr() != adapter.model.get_parameter("fc.weight").data_ptr()
    assert "seen" not in vars(adapter)


def test_a_file_has_every_weight_once() -> None:
    wide = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(1024, 5))
    q = petal.DiagonalGaussian(dict(wide.named_parameters()), {k: v * 0 for k, v in wide.named_parameters()})
    adapter = petal.accelerate(petal.Guard(petal.Petal(wide, q, prior_weight=1e-9)), policy=Policy())
    run(adapter, 1, 2)
    weights = sum(p.numel() * 4 for p in wide.parameters())
    # student, teacher, source, two moments, mean and variance, a good snapshot and a candidate
    assert len(pickle.dumps(adapter)) < 10 * weights + 100_000


def test_memories_and_posteriors_belong_to_the_copy() -> None:
    adapter = make("rotta", every=12)
    run(adapter, 1)
    for way in WAYS.values():
        other = way(adapter)
        assert other.memory.owner is other
    adapter = make("petal", "auto")
    other = saved(adapter)
    assert all(torch.equal(other.posterior.mean[name], p) for name, p in other.source.named_parameters())
    q = adapter.posterior
    assert copy.deepcopy(q) is q
    again = pickle.loads(pickle.dumps(q))
    assert all(torch.equal(again.var[k], v) for k, v in q.var.items())
    with pytest.raises(TypeError):
        again.mean["x"] = torch.zeros(1)


def stepped(written: bytes, answers: object) -> None:
    adapter = pickle.loads(written)
    answers.put((adapter(images(seed=4)).numpy(), adapter.model.fc.weight.detach().numpy()))  # type: ignore[attr-defined]


def test_another_process_goes_on() -> None:
    adapter = make("petal", "auto")
    run(adapter, 1, 2)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=stepped, args=(pickle.dumps(adapter), answers))
    process.start()
    logits, weight = answers.get()
    process.join()
    torch.testing.assert_close(torch.from_numpy(logits), adapter(images(seed=4)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(weight), adapter.model.fc.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("around", [lambda a: a, AROUND["small+guard"]])
def test_threads_that_share_an_adapter_wait_for_each_other(around: Callable[..., petal.Adapter], engine: str) -> None:
    shared, alone = (around(make("petal", engine)) for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: shared(images()) if n % 3 else shared.predict(images()), range(24)))
    for _ in range(16):
        alone(images())
    assert same(shared.state_dict(), alone.state_dict())


def test_back_to_plain_code_every_parameter_has_made_as_many_steps() -> None:
    adapter, plain = make("petal", "auto"), make("petal")
    for one in (adapter, plain):
        run(one, 1, 2)
    petal.accelerate(adapter, "eager")
    for ours, theirs in zip(run(adapter, 3, 4), run(plain, 3, 4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert {float(state["step"]) for state in adapter.optimizer.state.values()} == {4.0}


def test_moving_is_refused_with_the_way_to_do_it() -> None:
    adapter = petal.Tent(network(), lr=0.1)
    run(adapter, 1)
    assert adapter.to("cpu") is adapter
    assert adapter.float() is adapter
    for ask in (lambda: adapter.double(), lambda: adapter.to("meta"), lambda: petal.Guard(adapter).half()):
        with pytest.raises(petal.ConfigError, match=r"\(cpu, torch.float32\): move the network first.* new.load_weights\("):
            ask()
    moved = petal.Tent(network().double(), lr=0.1)
    moved.load_weights(adapter.weights())
    torch.testing.assert_close(moved.predict(images().double()).float(), adapter.predict(images()))


# Without learning, and without the method


@pytest.mark.parametrize("around", [lambda a: a, AROUND["small"], AROUND["guard"]])
def test_a_frozen_adapter_predicts_and_learns_again_when_thawed(around: Callable[..., petal.Adapter]) -> None:
    adapter = around(make("tent"))
    run(adapter, 1, 2)
    adapter.freeze()
    method = getattr(adapter, "method", adapter)                # what goes around it follows the stream
    before = method.state_dict()
    expected = adapter.predict(images(seed=3))
    assert torch.equal(adapter(images(seed=3)), expected)
    assert same(method.state_dict(), before)
    adapter.thaw()
    run(adapter, 3, 4)
    assert not same(method.state_dict(), before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("net", ["batch-norm", "group-norm", "vit"])
@pytest.mark.parametrize("kind", ["tent", "petal", "source"])
def test_the_exported_network_answers_as_the_adapter(kind: str, net: str, engine: str, tmp_path: Path) -> None:
    adapter = make(kind, engine, network(net), **({"views": 0} if kind == "petal" else {}))
    run(adapter, 1, 2, 3)
    found = adapter.export()
    assert type(found) is type(network(net))
    with torch.no_grad():
        torch.testing.assert_close(found(images(seed=5)), adapter.predict(images(seed=5)), rtol=1e-4, atol=1e-5)
    assert not any(module._forward_pre_hooks for name, module in found.named_modules())
    assert not any(type(module).__module__.startswith("petal") for module in found.modules())
    if kind == "source" or net != "batch-norm":
        network(net).load_state_dict(found.state_dict())
    before = adapter.state_dict()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(1)
    assert same(adapter.state_dict(), before)


def test_with_data_the_exported_network_has_running_statistics_of_it() -> None:
    adapter = make("tent", lr=0.1)
    run(adapter, 1, 2, 3)
    data = [images(24, seed=4), (images(24, seed=5), torch.zeros(24))]
    found = adapter.export(data)
    plain = network()
    plain.load_state_dict(found.state_dict())
    torch.testing.assert_close(plain.norm1.weight, adapter.model.norm1.weight)
    x = plain.conv1(torch.cat([images(24, seed=4), images(24, seed=5)]))
    torch.testing.assert_close(found.norm1.running_mean, x.mean((0, 2, 3)))
    expected = torch.stack([part.var((0, 2, 3)) for part in x.chunk(2)]).mean(0)
    torch.testing.assert_close(found.norm1.running_var, expected)
    assert not found.training
    assert torch.equal(found(images(1)), plain(images(1)))              # of any size, with dropout off
    with pytest.raises(petal.ConfigError, match="no batch"):
        adapter.export([])


def test_the_network_to_export_is_named() -> None:
    adapter = make("petal")
    run(adapter, 1, 2)
    for name in ("model", "teacher", "source"):
        weight = adapter.export(network=name).fc.weight
        assert torch.equal(weight, getattr(adapter, name).fc.weight)
        assert weight.requires_grad
    assert torch.equal(petal.Guard(adapter).export().fc.weight, adapter.teacher.fc.weight)
    for one in (adapter, petal.Guard(adapter)):
        with pytest.raises(petal.ConfigError, match="no network 'pupil' in here: model, teacher, source"):
            one.export(network="pupil")


# Warnings


def test_a_batch_of_one_with_batch_statistics_is_warned_of_once() -> None:
    adapter = petal.Tent(network())
    with pytest.warns(petal.PetalWarning, match=r"a batch of one sample .*\(Tent\): give larger batches, or put"):
        adapter(images(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter(images(1))
        petal.Tent(network())(images(2))
        petal.Tent(network("group-norm"))(images(1))
        petal.Source(network())(images(1))
        petal.NOTE(network())(images(1))
        petal.SmallBatch(petal.Tent(network()))(images(1))


def test_a_half_precision_update_that_is_not_made_is_warned_of_once() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    descent = Descent({"p": parameter}, torch.optim.SGD([parameter], lr=0.1), torch.Generator())
    with pytest.warns(petal.PetalWarning, match="float16.*network.float"):
        descent((parameter * 6e4).sum() * 2)
    descent((parameter * 6e4).sum() * 2)
    assert descent.skipped == 2
    wide = nn.Parameter(torch.ones(3))
    other = Descent({"p": wide}, torch.optim.SGD([wide], lr=0.1), torch.Generator())
    other((wide * torch.inf).sum())
    assert other.skipped == 1


# Answers of before and of after


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_of_after_the_update_are_those_of_the_weights_then(engine: str) -> None:
    rate, x = 0.05, images()
    adapters = [petal.Tent(network(), lr=rate, optimizer=torch.optim.SGD) for _ in range(4)]
    for adapter in adapters:
        petal.accelerate(adapter, engine, policy=Policy())

    model = by_batch(network())
    scales = [p for name, p in model.named_parameters() if "norm" in name]
    logits = model(x)
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    gradients = torch.autograd.grad(entropy, scales)
    with torch.no_grad():
        for p, gradient in zip(scales, gradients, strict=True):
            p -= rate * gradient
        after = model(x)
    assert (after - logits).abs().max() > 1e-3
    one, other = (petal.predict(adapter, x, after=choice) for adapter, choice in zip(adapters, (False, True), strict=False))
    torch.testing.assert_close(one.probabilities, logits.softmax(1).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.probabilities, after.softmax(1), rtol=1e-4, atol=1e-5)
    y = torch.arange(12) % 5
    before_score, after_score = (
        petal.evaluate(adapter, [(x, y)], after=choice) for adapter, choice in zip(adapters[2:], (False, True), strict=True)
    )
    assert before_score.mean.nll == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-4)
    assert after_score.mean.nll == pytest.approx(nn.functional.cross_entropy(after, y).item(), rel=1e-4)
    assert same(adapters[2].state_dict(), adapters[3].state_dict())         # the update is the same


def by_batch(model: ConvNet) -> ConvNet:
    """Batch norms by the statistics of the batch, written out."""
    class Norm(nn.Module):
        def __init__(self, layer: nn.BatchNorm2d) -> None:
            super().__init__()
            self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

        def forward(self, x: Tensor) -> Tensor:
            mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
            return (x - mean) / (var + self.eps).sqrt() * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)

    model.norm1, model.norm2 = Norm(model.norm1), Norm(model.norm2)
    return model


def test_statistics_can_be_pickled() -> None:
    (statistics,) = needed("eata", network())
    again = pickle.loads(pickle.dumps(statistics))
    assert torch.equal(again.prototypes, statistics.prototypes)
    assert copy.deepcopy(statistics) is statistics


@pytest.mark.parametrize("around", [petal.ASR, petal.Reservoir, petal.Guard, petal.Ordered], ids=lambda kind: kind.__name__)
def test_what_goes_around_a_method_stops_with_it(around: type[petal.Adapter]) -> None:
    adapter = around(petal.ETA(network(), lr=0.1, margin=1.0, similarity=1.0))
    adapter(images(16))
    adapter.freeze()
    before = {name: value.clone() for name, value in adapter.adapted.items()}
    adapter(images(16, seed=1))
    assert all(torch.equal(value, before[name]) for name, value in adapter.adapted.items())
    adapter.thaw()
    adapter(images(16, seed=1))
    assert not all(torch.equal(value, before[name]) for name, value in adapter.adapted.items())
