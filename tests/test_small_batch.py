from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal import ConfigError, InputError, SmallBatch
from petal.norm import Following, batch_norms, with_recent_norm
from petal.recommended import flagship


class Recording(petal.Source):
    """Keeps the batches that it is given to learn from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.adapt({"fc.bias": self.model.fc.bias}, 1e-3)
        self.batches: list[Tensor] = []

    def step(self, x: Tensor) -> Tensor:
        self.batches.append(x.clone())
        return self.prediction(x)


class Labelled(nn.Module):
    """A classifier that reads the label from the first pixel, so that tests say what is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        labels = nn.functional.one_hot(x[:, 0, 0, 0].round().long(), 5)
        return 8 * labels * x[:, 0, 0, 1:2] + 0 * self.fc.weight.sum()


def labelled(labels: list[int], sure: float = 1.0) -> Tensor:
    x = torch.zeros(len(labels), 1, 2, 2)
    x[:, 0, 0, 0] = torch.tensor(labels)
    x[:, 0, 0, 1] = sure
    return x


def norms_of(model: nn.Module, window: float = 100, source: float = 0.0, own: float = 0.0) -> tuple[Any, Any, Any]:
    following = Following(window, next(iter([*model.parameters(), torch.zeros(1)])).detach())
    return following, *with_recent_norm(model, following, source=source, own=own)


def test_without_anything_seen_it_is_the_source() -> None:
    model = network()
    _, same, layers = norms_of(petal.CoTTA(model, views=0).teacher)
    assert len(layers) == 2
    assert torch.allclose(same(images()), model(images()), atol=1e-5)


def one_layer() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean, layer.running_var = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 0.5])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([2.0, 1.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    return layer


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shuffled", [0.0, 0.3, 1.0])
def test_estimates_against_numpy(shuffled: float) -> None:
    """Averages of classes and of all images move by what a batch says, and it is normalised by them and by each image."""
    layer = one_layer()
    following, norm, _ = norms_of(nn.Sequential(layer), window=20, source=0.25, own=0.125)
    following.begin(4)
    x, labels = normal(7), torch.tensor([0, 0, 0, 0, 2, 3, -1])
    following.expect(labels, shuffled)
    data = x.numpy().astype(np.float64)
    own = np.stack([data.mean((2, 3)), (data**2).mean((2, 3))])                     # [2, n, C]
    assert layer.running_mean is not None
    assert layer.running_var is not None
    start = np.stack([layer.running_mean.numpy(), layer.running_var.numpy() + layer.running_mean.numpy() ** 2])
    recent = np.repeat(start[:, None], 4, 1).astype(np.float64)
    for k in (0, 2, 3):
        for one in own[:, (labels == k).numpy()].swapaxes(0, 1):                    # one after the other
            recent[:, k] += 4 / 20 * (one - recent[:, k])
    every = start + (1 - (1 - 1 / 20) ** 6) * (own[:, :6].mean(1) - start)          # the last one is not known
    estimate = (1 - shuffled) * (0.75 * recent.mean(1) + 0.25 * start) + shuffled * every
    share = 0.125 * (1 - shuffled)
    mean, square = (1 - share) * estimate[:, None] + share * own
    expected = (data - mean[..., None, None]) / np.sqrt((square - mean**2)[..., None, None] + layer.eps)
    expected = expected * np.array([2.0, 1.0, 0.5])[:, None, None] + np.array([0.0, 1.0, -1.0])[:, None, None]
    with torch.no_grad():
        assert np.allclose(norm(x).numpy(), expected, atol=1e-4)
    assert np.allclose(norm[0].moved[:, :4].numpy(), recent, atol=1e-5)
    assert np.allclose(norm[0].recent.numpy(), start[:, None], atol=1e-6)           # until the batch is accepted


def test_classes_are_drawn_together() -> None:
    """Also those that did not come: no average stays where it is because nothing is taken for its class."""
    following, norm, (layer,) = norms_of(nn.Sequential(one_layer()), window=20)
    following.begin(4)
    x = normal(2)
    following.expect(torch.tensor([0, 2]), 0.0, pull=0.25)
    with torch.no_grad():
        norm(x)
    own = torch.stack([x.mean((2, 3)), x.square().mean((2, 3))])
    toward = layer.start.lerp(own.mean(1), 0.25)
    assert torch.allclose(layer.moved[:, 1], toward, atol=1e-5)
    assert torch.allclose(layer.moved[:, 2], toward.lerp(own[:, 1], 0.2), atol=1e-5)


def test_the_estimates_look_at_the_memory_in_order_of_arrival() -> None:
    adapter = SmallBatch(petal.Tent(network()), memory=12, every=6)
    looked: list[Tensor] = []
    run = adapter._run

    def noted(body: Any, x: Tensor) -> Tensor:
        looked.append(x)
        return run(body, x)

    adapter._run = noted  # type: ignore[method-assign]
    for seed in range(4):
        adapter(images(6, seed=seed))
    state = adapter.state_dict()
    number = state["small.facts"][:, 2]
    assert not torch.equal(number, number.sort().values)                        # it is held by class
    assert torch.equal(looked[-1], state["small.samples"][number.argsort()])


def test_a_class_counts_the_same_however_often_it_comes() -> None:
    """Nine in ten images are of class 0: the estimate is still that of classes in equal shares."""
    following, norm, (layer,) = norms_of(nn.Sequential(nn.BatchNorm1d(1).eval()), window=10)
    following.begin(2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        labels = (torch.rand(10, generator=generator) > 0.9).long()
        following.expect(labels, 0.0)
        with torch.no_grad():
            norm(labels[:, None] * 4.0 + 0.1 * torch.randn(10, 1, generator=generator))
        layer.recent.copy_(layer.moved)
    assert layer.estimate(layer.recent)[0].item() == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("value", [1e4, 1e20, float("inf"), float("nan")])
def test_one_image_moves_the_estimates_little_whatever_its_numbers(value: float) -> None:
    following, norm, (layer,) = norms_of(nn.Sequential(one_layer()), window=100)
    following.begin(10)
    x = normal(10)
    x[3] = value
    following.expect(torch.arange(10), 0.5)
    with torch.no_grad():
        answer = norm(x)
    before, after = layer.estimate(layer.recent), layer.estimate(layer.moved)
    deviation = (before[1] - before[0].square()).sqrt()
    assert ((after[0] - before[0]).abs() < 0.2 * deviation).all()
    assert answer[:3].isfinite().all()
    assert answer[4:].isfinite().all()


def test_more_classes_than_averages_share_them() -> None:
    following, norm, (layer,) = norms_of(nn.Sequential(one_layer()))
    following.begin(100)
    following.expect(torch.tensor([3, 19, 35]), 0.0)
    with torch.no_grad():
        norm(normal(3))
    moved = (layer.moved != layer.recent).any(2).any(0)
    assert moved.nonzero().flatten().tolist() == [3, 16]                            # 3 modulo 16, and that of all images


def test_the_memory_is_balanced_and_the_method_learns_from_whole_batches() -> None:
    inner = Recording(Labelled())
    adapter = SmallBatch(inner, memory=8, every=4, shuffled=True)
    for label in [0] * 30 + [1] * 3 + [2] * 2:
        adapter(labelled([label]))
    assert {len(b) for b in inner.batches} == {8}
    assert len(inner.batches) == (35 - 8) // 4 + 1
    adapter(labelled([0, 0, 0, 0]))
    counts = torch.bincount(inner.batches[-1][:, 0, 0, 0].long(), minlength=3).tolist()
    assert counts == [3, 3, 2]


def test_recent_and_certain_samples_stay_and_old_ones_go() -> None:
    inner = Recording(Labelled())
    adapter = SmallBatch(inner, memory=4, every=1, age=10, shuffled=True, certainty=1.0)
    adapter(labelled([0] * 4, sure=0.05))
    adapter(labelled([0] * 4, sure=1.0))
    assert inner.batches[-1][:, 0, 0, 1].tolist() == [1.0] * 4
    adapter(labelled([1]))
    assert 1 in inner.batches[-1][:, 0, 0, 0].tolist()
    for _ in range(12):
        adapter(labelled([0]))
    assert inner.batches[-1][:, 0, 0, 0].tolist() == [0.0] * 4  # the only one of class 1 was too old


@pytest.mark.parametrize(("option", "value"), [("window", 5.0), ("source", 0.9), ("own", 0.9), ("memory", 8), ("every", 40),
                                               ("age", 5), ("shuffled", True), ("certainty", 5.0)])  # fmt: skip
def test_every_argument_changes_something(option: str, value: float) -> None:
    def last(**options: float) -> Tensor:
        adapter = SmallBatch(petal.Tent(network(), lr=0.1), **({"memory": 16, "every": 8, "age": 40} | options))  # type: ignore[arg-type]
        for seed in range(12):
            adapter(images(6, seed=seed))
        return adapter.predict(images(seed=50))

    assert not torch.allclose(last(), last(**{option: value}), atol=1e-6)


def test_one_image_at_a_time_and_any_cut_of_the_stream() -> None:
    adapter = SmallBatch(petal.Petal(network(), petal.DiagonalGaussian.isotropic(network(), std=0.05), views=2), memory=16)
    for size in (1, 1, 7, 30, 1, 64, 2):
        assert adapter(images(size)).shape == (size, 5)
    flat = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    assert SmallBatch(petal.Tent(flat))(torch.rand(1, 4)).shape == (1, 3)  # which batch statistics cannot do


def test_correlated_labels_do_not_break_it() -> None:
    """Images of one class at a time, shifted: batch statistics take the class away, the mode keeps it."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[1].weight.copy_(4 * torch.eye(4))
        model[1].bias.zero_()
        model[0].running_mean.fill_(0.5)  # of classes in equal shares
        model[0].running_var.fill_(0.75)

    def run(adapter: petal.Adapter) -> float:
        wrong = 0
        for number in range(200):
            labels = torch.full((5,), (number // 8) % 4)
            x = 2 * nn.functional.one_hot(labels, 4) + 0.5 * torch.randn(5, 4, generator=generator.manual_seed(number))
            x[:, 0] += 3 * (number >= 40)                       # a shift that the source takes for class 0
            wrong += int((adapter(x).argmax(1) != labels).sum())
        return wrong / 1000

    source, bn, small = run(petal.Source(model)), run(petal.BatchNorm(model)), run(SmallBatch(petal.BatchNorm(model)))
    assert small < 0.5 * source
    assert small < 0.5 * bn


def test_it_predicts_with_the_teacher() -> None:
    cotta = petal.CoTTA(network(), views=0)
    adapter = SmallBatch(cotta, shuffled=True)
    before = adapter.predict(images(1))
    with torch.no_grad():
        cotta.teacher.fc.bias.add_(torch.tensor([5.0, 0, 0, 0, 0]))
        cotta.model.fc.bias.add_(99.0)
    assert torch.allclose(adapter.predict(images(1)) - before, torch.tensor([[5.0, 0, 0, 0, 0]]), atol=1e-4)


def test_mistakes_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"Guard\(Tent\) is wrapped already: swap the two"):
        SmallBatch(petal.Guard(petal.Tent(network())))
    with pytest.raises(ConfigError, match="memory must be a whole number"):
        SmallBatch(petal.Tent(network()), memory=1)
    with pytest.raises(ConfigError, match="keeps no running statistics"):
        SmallBatch(petal.Tent(nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, track_running_stats=False))))
    adapter = SmallBatch(petal.Tent(network()))
    adapter(images())
    before = adapter.state_dict()
    with pytest.raises(InputError, match=r"\[2, 4, 8, 8\]"):
        adapter(torch.rand(2, 4, 8, 8))
    for key, value in (("small.norm.0", torch.zeros(2, 5, 99)), ("small.facts", None), ("small.x", torch.zeros(1))):
        state = {k: v for k, v in before.items() if k != key} | ({} if value is None else {key: value})
        with pytest.raises(ConfigError, match="small"):
            adapter.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in adapter.state_dict().items())


def test_engine_compiles_for_the_memory_s_shape() -> None:
    adapter = SmallBatch(petal.Tent(network()), memory=10)
    policy = petal.engine.Policy()
    assert petal.accelerate(adapter, policy=policy) is adapter
    assert adapter.adapter.executor is not None
    assert adapter.inner_shape((3, 3, 8, 8)) == (10, 3, 8, 8)
    assert adapter.inner_shape((64, 3, 8, 8)) == (64, 3, 8, 8)      # used as it is; and from the memory:
    assert adapter.method.batch_sizes == (10,)
    assert petal.Guard(adapter).inner_shape((3, 3, 8, 8)) == (3, 3, 8, 8)
    for outer in (adapter, petal.Guard(adapter)):
        petal.accelerate(outer, batch_shape=(3, 3, 8, 8))
        assert adapter.method.executor.policy.shapes == {torch.Size([10, 3, 8, 8])}
    assert len(batch_norms(network())) == 2


def test_the_engine_runs_the_copies_on_the_weights_of_the_method() -> None:
    def answers(fast: bool) -> tuple[list[Tensor], SmallBatch]:
        adapter = SmallBatch(petal.Petal(network(), **flagship()), memory=12, every=12)
        if fast:
            petal.accelerate(adapter, policy=petal.engine.Policy())
        return [adapter(images(6, seed=seed)) for seed in range(8)], adapter

    (plain, eager), (engine, fast) = answers(False), answers(True)
    for one, other in zip(plain, engine, strict=True):
        assert torch.allclose(one, other, atol=0.05 * float(one.abs().max()))
    for adapter in (eager, fast):
        for name, copy in adapter._copies.items():
            own = dict(getattr(adapter.method, name).named_parameters())
            assert all(p is own[key] for key, p in copy.named_parameters())
    for adapter in (eager, fast):                                               # and the method learned
        assert all(not torch.equal(p, adapter.origin()[name]) for name, p in adapter.adapted.items())
    moved = fast.adapter.teacher.fc.bias
    before = fast.predict(images(6, seed=50))
    with torch.no_grad():
        moved.add_(torch.tensor([5.0, 0, 0, 0, 0]))
    assert not torch.allclose(fast.predict(images(6, seed=50)), before)         # they see what happens to the weights


def test_learning_that_is_off_still_follows_the_stream() -> None:
    adapter = SmallBatch(petal.Petal(network(), **flagship()), memory=12, every=12)
    start = {key: value.clone() for key, value in adapter.weights().items()}
    for seed in range(4):
        adapter.observe(images(6, seed=seed))
    assert all(torch.equal(value, start[key]) for key, value in adapter.weights().items())
    state = adapter.state_dict()
    assert not torch.equal(state["small.norm.teacher.0"], SmallBatch(adapter.adapter).state_dict()["small.norm.teacher.0"])
    assert len(state["small.samples"]) == 12


def test_each_source_of_images_has_its_order() -> None:
    adapter = SmallBatch(petal.Tent(network()), memory=12, every=12)
    x = images(6)
    assert torch.equal(adapter.predict(x, stream=["a", "b"] * 3), adapter(x, stream=["a", "b"] * 3))
    assert sorted(adapter.prior._tracks) == ["a", "b"]  # type: ignore[union-attr]
    before = adapter.state_dict()
    with pytest.raises(InputError, match="6 images"):
        adapter(x, stream=["a"])
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
    with pytest.raises(ConfigError, match="uses the order of the stream already"):
        petal.Ordered(adapter)
    assert petal.Ordered(SmallBatch(petal.Tent(network()), shuffled=True)).ordered


def test_many_images_at_a_time() -> None:
    """More than fit at once are taken in parts; predict says what a call returns and changes nothing."""
    adapter = SmallBatch(petal.Tent(network()), memory=12, every=12)
    adapter(images(6))
    before, x = adapter.state_dict(), images(600, seed=1)
    said = adapter.predict(x)
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
    assert torch.equal(said, adapter(x))
