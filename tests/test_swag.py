"""The fit of the posterior against NumPy and a hand-written training loop."""

import copy
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import petal
from networks import images, network
from petal import PosteriorError, fit_swag
from petal.swag import FitProgress, Moments, snapshot_batches


@settings(max_examples=100, deadline=None)
@given(
    st.floats(-1e6, 1e6),
    st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=12),
    st.sampled_from([1.0, 1e-3, 1e-9, 1e-15]),
)
def test_moments_are_never_negative(offset: float, rows: list[list[float]], spread: float) -> None:
    values = offset + spread * np.array(rows)
    moments = Moments()
    for row in values:
        moments.add({"w": torch.tensor(row)})
    var = moments.var()["w"].numpy()
    assert (var >= 0).all()
    tolerance = 4 * np.finfo(float).eps * (abs(offset) + 1)
    np.testing.assert_allclose(moments.mean()["w"], values.mean(0), rtol=1e-12, atol=tolerance)
    exact = values.astype(np.longdouble).var(0).astype(float)  # a float64 mean is off by `tolerance` at most
    assert (np.abs(var - exact) <= 1e-9 * exact + 4 * np.sqrt(exact) * tolerance + 4 * tolerance**2).all()
    assert (var[np.ptp(values, axis=0) == 0] == 0).all()


def test_moments_of_float32_snapshots_that_differ_in_the_last_bit() -> None:
    """Where E[w²] - E[w]² in float32 gives noise of either sign."""
    base = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    snapshots = [base, torch.nextafter(base, torch.tensor(9.0)), base]
    moments = Moments()
    for s in snapshots:
        moments.add({"w": s})
    exact = np.stack([s.double().numpy() for s in snapshots]).var(0)
    np.testing.assert_allclose(moments.var()["w"], exact, rtol=1e-6)
    naive = torch.stack(snapshots).square().mean(0) - torch.stack(snapshots).mean(0).square()
    assert (naive < 0).any()


def test_moments_resume_exactly_and_what_they_gave_stays() -> None:
    values = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    whole, first = Moments(), Moments()
    for v in values:
        whole.add({"a.mean.b": v})
    for v in values[:3]:
        first.add({"a.mean.b": v})
    state, mean, var = first.state_dict(), first.mean(), first.var()
    kept = [t["a.mean.b"].clone() for t in (mean, var)]
    first.add({"a.mean.b": values[5] + 100})
    assert torch.equal(mean["a.mean.b"], kept[0])
    assert torch.equal(var["a.mean.b"], kept[1])
    second = Moments()
    second.load_state_dict(state)
    for v in values[3:]:
        second.add({"a.mean.b": v})
    assert second.count == 6
    assert torch.equal(second.mean()["a.mean.b"], whole.mean()["a.mean.b"])
    assert torch.equal(second.var()["a.mean.b"], whole.var()["a.mean.b"])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60))
def test_snapshots_are_spaced_evenly_and_end_the_epoch(batches: int, per_epoch: int) -> None:
    if per_epoch > batches:
        return
    due = snapshot_batches(batches, per_epoch)
    assert len(set(due)) == per_epoch
    assert due[-1] == batches
    gaps = np.diff([0, *due])
    assert gaps.max() - gaps.min() <= 1


# ---------------------------------------------------------------- fit_swag

BATCHES = 6


def loader(batches: int = BATCHES, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return [
        (images(size, seed=i), torch.randint(0, 5, (size,), generator=torch.Generator().manual_seed(i)))
        for i in range(batches)
    ]


def without_dropout(name: str = "batch-norm") -> nn.Module:
    model = network(name)
    model.dropout.p = 0.0
    return model


def hand_written(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], epochs: int, lr: float, momentum: float, decay: float
) -> list[dict[str, np.ndarray]]:
    """SGD with momentum on every parameter, batch norm by its running statistics: the weights after every batch."""
    net = copy.deepcopy(model).eval()  # dropout is zero in these networks
    velocity: dict[str, Tensor] = {}
    path = []
    for _ in range(epochs):
        for x, y in data:
            log_p = net(x).log_softmax(1)
            loss = -log_p[torch.arange(len(y)), y].mean()
            grads = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for (name, p), g in zip(net.named_parameters(), grads, strict=True):
                    g = g + decay * p
                    velocity[name] = momentum * velocity[name] + g if name in velocity else g
                    p -= lr * velocity[name]
            path.append({n: p.detach().double().numpy().copy() for n, p in net.named_parameters()})
    return path


@pytest.mark.parametrize("net", ["batch-norm", "group-norm"])
@pytest.mark.parametrize(("per_epoch", "after"), [(1, [6]), (2, [3, 6]), (4, [2, 3, 5, 6]), (6, [1, 2, 3, 4, 5, 6])])
def test_path_and_moments(net: str, per_epoch: int, after: list[int]) -> None:
    model, data = without_dropout(net), loader()
    snapshots: list[dict[str, Tensor]] = []
    q = fit_swag(
        model, data, epochs=2, lr=0.02, momentum=0.8, weight_decay=0.01, snapshots_per_epoch=per_epoch,
        on_snapshot=snapshots.append, damping=0.125,
    )  # fmt: skip
    path = hand_written(model, data, 2, 0.02, 0.8, 0.01)
    expected = [path[e * BATCHES + b - 1] for e in range(2) for b in after]
    assert len(snapshots) == len(expected)
    for got, weights in zip(snapshots, expected, strict=True):
        for name, value in weights.items():
            np.testing.assert_allclose(got[name].double(), value, rtol=0, atol=2e-5)
    for name in q.mean:
        stack = np.stack([s[name].double().numpy() for s in snapshots])
        np.testing.assert_allclose(q.mean[name].double(), stack.mean(0), rtol=1e-6)
        np.testing.assert_allclose(q.var[name].double(), stack.var(0), rtol=1e-6, atol=1e-30)
        assert (q.var[name] >= 0).all()
    assert any((v > 0).any() for v in q.var.values())
    assert q.damping == 0.125


@pytest.mark.parametrize("train_batch_norm", [False, True])
@pytest.mark.parametrize("mode", [True, False])
def test_the_given_network_is_unchanged(train_batch_norm: bool, mode: bool) -> None:
    model = network().train(mode)
    model.norm1.train(not mode)
    model.conv1.weight.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    fit_swag(model, loader(), epochs=1, lr=0.1, train_batch_norm=train_batch_norm)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert [k for k, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight"]
    assert (model.fc.weight.grad == 1).all()
    assert model.conv2.weight.grad is None


def test_batch_norm_stays_as_it_is_by_default() -> None:
    model = network()
    q = fit_swag(model, loader(), epochs=2, lr=0.05)
    assert q.buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(q.buffers[k], v) for k, v in model.named_buffers())
    assert not torch.equal(q.mean["norm1.weight"], model.norm1.weight), "its scale is trained"


def test_trained_batch_norm_has_the_statistics_of_the_mean() -> None:
    model, data = without_dropout(), loader()
    q = fit_swag(model, data, epochs=2, lr=0.05, train_batch_norm=True)
    weights = {k: v.double() for k, v in q.mean.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        seen[name].append((mean, x.var((0, 2, 3), correction=1)))
        scaled = (x - mean.view(-1, 1, 1)) / (var + 1e-5).sqrt().view(-1, 1, 1)
        return scaled * weights[f"{name}.weight"].view(-1, 1, 1) + weights[f"{name}.bias"].view(-1, 1, 1)

    seen: dict[str, list[tuple[Tensor, Tensor]]] = {"norm1": [], "norm2": []}
    for x, _ in data:
        first = norm(nn.functional.conv2d(x.double(), weights["conv1.weight"], padding=1), "norm1").relu()
        norm(nn.functional.conv2d(first, weights["conv2.weight"], stride=2, padding=1), "norm2")
    for name, values in seen.items():
        mean, var = (torch.stack(part).mean(0) for part in zip(*values, strict=True))
        np.testing.assert_allclose(q.buffers[f"{name}.running_mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(q.buffers[f"{name}.running_var"], var, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(q.buffers["norm1.running_mean"], model.norm1.running_mean, atol=1e-3)
    frozen = fit_swag(model, data, epochs=2, lr=0.05)
    assert not torch.allclose(frozen.mean["conv1.weight"], q.mean["conv1.weight"], atol=1e-5)


def test_dropout_is_on_while_fitting() -> None:
    torch.manual_seed(0)
    first = fit_swag(network(), loader(), epochs=1, lr=0.1)
    second = fit_swag(network(), loader(), epochs=1, lr=0.1)
    assert not torch.equal(first.mean["fc.weight"], second.mean["fc.weight"])


def test_progress() -> None:
    seen: list[FitProgress] = []
    data = loader(4)
    model = without_dropout()
    fit_swag(model, data, epochs=2, lr=1e-3, snapshots_per_epoch=2, progress=seen.append)
    assert [(p.epoch, p.batch, p.snapshots) for p in seen] == [
        (1, 1, 0), (1, 2, 1), (1, 3, 1), (1, 4, 2), (2, 1, 2), (2, 2, 3), (2, 3, 3), (2, 4, 4),
    ]  # fmt: skip
    assert {(p.epochs, p.batches) for p in seen} == {(2, 4)}
    x, y = data[0]
    assert seen[0].loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


BASE = {"epochs": 2, "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0, "snapshots_per_epoch": 1, "autocast": None}


@pytest.mark.parametrize(
    "change",
    [{"epochs": 3}, {"lr": 0.02}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"snapshots_per_epoch": 2},
     {"train_batch_norm": True}, {"autocast": torch.bfloat16}],
)  # fmt: skip
def test_every_option_counts(change: dict[str, object]) -> None:
    plain = fit_swag(without_dropout(), loader(), **BASE)
    same = fit_swag(without_dropout(), loader(), **BASE)
    changed = fit_swag(without_dropout(), loader(), **(BASE | change))
    assert all(torch.equal(plain.mean[k], v) for k, v in same.mean.items())
    assert any(not torch.equal(plain.mean[k], v) for k, v in changed.mean.items())
    assert all(v.dtype == torch.float32 for v in changed.mean.values())


def test_defaults_are_the_papers() -> None:
    steps: list[FitProgress] = []
    q = fit_swag(without_dropout(), loader(3), progress=steps.append)
    explicit = fit_swag(without_dropout(), loader(3), epochs=5, lr=8e-4, momentum=0.9, weight_decay=0.0)
    assert len(steps) == 15
    assert steps[-1].snapshots == 5
    assert q.damping == 1e-6
    assert all(torch.equal(v, explicit.mean[k]) for k, v in q.mean.items())


class Unsized:
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.data)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((x, y) for xs, ys in loader() for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("kind", ["iterable", "DataLoader"])
def test_a_loader_without_length(kind: str) -> None:
    data = Unsized(loader()) if kind == "iterable" else torch.utils.data.DataLoader(Stream(), batch_size=10)
    seen: list[FitProgress] = []
    q = fit_swag(without_dropout(), data, epochs=2, progress=seen.append)
    sized = fit_swag(without_dropout(), loader(), epochs=2)
    assert all(torch.equal(v, sized.mean[k]) and torch.equal(q.var[k], sized.var[k]) for k, v in q.mean.items())
    assert {p.batches for p in seen} == {None}
    with pytest.raises(PosteriorError, match="need a loader with a length"):
        fit_swag(without_dropout(), data, epochs=2, snapshots_per_epoch=2)


def test_fits_where_gradients_are_off_and_any_whole_labels() -> None:
    expected = fit_swag(without_dropout(), loader(), epochs=1)
    with torch.no_grad():
        q = fit_swag(without_dropout(), [[x, y.to(torch.int32)] for x, y in loader()], epochs=1)
    assert all(torch.equal(v, expected.mean[k]) for k, v in q.mean.items())


class Liar(list):
    def __len__(self) -> int:
        return 9


X, Y = images(4), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "0 batches"),
        (Unsized([]), {}, "no batches in epoch 1"),
        (iter([(X, Y)]), {}, "no batches in epoch 2"),
        (Liar([(X, Y)]), {}, "9 batches and gave 1"),
        ([(X, Y)], {"snapshots_per_epoch": 2}, "2 snapshots per epoch do not fit into 1"),
        ([(X, torch.tensor([0, 1, 2, 5]))], {}, "batch 1 of epoch 1 has labels from 0 to 5"),
        ([(X, torch.tensor([0, 1, 2, -100]))], {}, "batch 1 of epoch 1 has labels from -100 to 2"),
        ([(X, Y[:3])], {}, r"labels of shape \[3\]"),
        ([(X, Y[:, None])], {}, r"labels of shape \[4, 1\]"),
        ([(X, Y), (X, Y.float())], {}, "batch 2 of epoch 1 has labels of type torch.float32"),
        ([(X,)], {}, "has no labels: it is a tuple.*petal.fit_laplace does without"),
        ([X], {}, "has no labels: it is a Tensor"),
        ([{"image": X}], {}, "has no labels: it is a dict"),
        ([(X, Y.tolist())], {}, "has labels that are a list: use torch.tensor"),
        ([(X, nn.functional.one_hot(Y))], {}, r"one-hot labels take labels.argmax\(1\)"),
        ([(X, Y), (X * math.nan, Y)], {}, "the loss is nan in batch 2 of epoch 1: the batch has NaN or Inf in 4"),
        ([(X, Y)], {"epochs": 0}, "epochs must be"),
        ([(X, Y)], {"snapshots_per_epoch": 0}, "snapshots_per_epoch must be"),
        ([(X, Y)], {"lr": 0.0}, "lr must be"),
        ([(X, Y)], {"lr": math.nan}, "lr must be"),
        ([(X, Y)], {"damping": -1.0}, "damping must be"),
        (iter([(X, Y)]), {"epochs": 1, "train_batch_norm": True}, "only once"),
        ([(X, Y)] * 9, {"lr": 1e30, "momentum": 0.0}, "lower lr|not finite"),
    ],
)
def test_bad_loaders_and_settings(data: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(PosteriorError, match=message):
        fit_swag(without_dropout(), data, **({"epochs": 2} | options))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[:0], "the batch is empty"),
        ((X * 255).byte(), r"images are floats in \[0, 1\]: use x.float\(\) / 255"),
        (X[:, :1], r"cannot take a batch of shape \[4, 1, 8, 8\]"),
        (X.numpy(), "use torch.from_numpy"),
    ],
)
def test_images_that_a_method_refuses_are_refused_alike(x: object, message: str) -> None:
    for call in (lambda: fit_swag(without_dropout(), [(x, Y[: len(x)])]), lambda: petal.Source(without_dropout())(x)):
        with pytest.raises(petal.InputError, match=message):
            call()


def test_a_network_without_parameters() -> None:
    with pytest.raises(PosteriorError, match="no parameters"):
        fit_swag(nn.Flatten(), [(X, Y)])


def test_petal_starts_from_a_fit() -> None:
    model = network()
    q = fit_swag(model, loader(), epochs=2, lr=0.01)
    adapter = petal.Petal(model, q, views=2)
    assert all(torch.equal(p, q.mean[k]) for k, p in adapter.model.named_parameters())
    assert adapter(images()).shape == (12, 5)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapped_network_is_fitted_by_its_own_names(wrap: object) -> None:
    model = without_dropout()
    q = fit_swag(model, loader(2), epochs=1, lr=0.1)
    again = fit_swag(wrap(model), loader(2), epochs=1, lr=0.1)
    assert list(again.mean) == list(q.mean) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(v, q.mean[k]) for k, v in again.mean.items())


@pytest.mark.parametrize("train_batch_norm", [False, True])
def test_a_fit_continues_from_its_state_exactly(train_batch_norm: bool) -> None:
    """Weights, momentum, moments, batch-norm statistics, and the random numbers that dropout draws."""
    options: dict[str, object] = {"epochs": 3, "lr": 0.05, "momentum": 0.9, "snapshots_per_epoch": 2,
                                  "train_batch_norm": train_batch_norm}  # fmt: skip
    states: dict[int, dict[str, Tensor]] = {}
    torch.manual_seed(0)
    whole = fit_swag(network(), loader(), on_epoch=lambda epoch, state: states.update({epoch: _copied(state)}), **options)
    for epoch in (1, 2, 3):
        torch.manual_seed(99)
        rest = fit_swag(network(), loader(), state=states[epoch], **options)
        for kind in ("mean", "var", "buffers"):
            for name, value in getattr(whole, kind).items():
                assert torch.equal(getattr(rest, kind)[name], value), (epoch, kind, name)


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("name", ["epoch", "network.fc.weight", "moments.count"])
def test_what_is_no_state_of_a_fit_is_refused(name: str) -> None:
    states: list[dict[str, Tensor]] = []
    fit_swag(network(), loader(), epochs=1, on_epoch=lambda epoch, state: states.append(_copied(state)))
    state = {key: value for key, value in states[0].items() if key != name}
    with pytest.raises(petal.PosteriorError, match="this is not the state of a fit of this network"):
        fit_swag(network(), loader(), epochs=2, state=state)
