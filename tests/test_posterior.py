"""The source posterior and its fit, against NumPy, plain autograd and a hand-written training loop."""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import petal
from networks import images, network
from oracle.algorithm import negative_log_prior
from petal import DiagonalGaussian, PosteriorError, fit_swag
from petal.posterior import FitProgress, Moments, snapshot_batches


def gaussian(model: nn.Module, seed: int = 0, **options: object) -> DiagonalGaussian:
    g = torch.Generator().manual_seed(seed)
    mean = {k: p.detach() + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype) for k, p in model.named_parameters()}
    var = {k: torch.rand(p.shape, generator=g, dtype=p.dtype) for k, p in model.named_parameters()}
    return DiagonalGaussian(mean, var, **options)


class WithScalar(nn.Module):
    """A parameter without dimensions, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.fc(x)


# ---------------------------------------------------------------- construction


def test_names_and_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(PosteriorError, match=r"'a' is only in the mean.*'b' is only in the variance"):
        DiagonalGaussian({"a": torch.ones(1), "c": torch.ones(1)}, {"b": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(PosteriorError, match=r"'a' is \[2, 3\] in the mean and \[3, 2\] in the variance"):
        DiagonalGaussian({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)})
    with pytest.raises(PosteriorError, match="and 2 more"):
        DiagonalGaussian({f"p{i}": torch.ones(1) for i in range(12)}, {})
    with pytest.raises(PosteriorError, match="at least one parameter"):
        DiagonalGaussian({}, {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["mean", "var"])
def test_values_that_are_not_finite_are_refused_by_name(bad: float, where: str) -> None:
    parts = {"mean": {"u": torch.ones(2), "w": torch.ones(2)}, "var": {"u": torch.ones(2), "w": torch.ones(2)}}
    parts[where]["w"][1] = bad
    with pytest.raises(PosteriorError, match="'w'"):
        DiagonalGaussian(**parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(PosteriorError, match=r"'w'.*floating point"):
        DiagonalGaussian({"w": torch.ones(2, dtype=dtype)}, {"w": torch.ones(2)})
    with pytest.raises(PosteriorError, match=r"'w'.*floating point"):
        DiagonalGaussian({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=dtype)})


@pytest.mark.parametrize("damping", [-1e-9, math.nan, math.inf])
def test_bad_damping(damping: float) -> None:
    with pytest.raises(PosteriorError, match="damping must be"):
        DiagonalGaussian({"w": torch.ones(1)}, {"w": torch.ones(1)}, damping=damping)


def test_variance_below_zero_is_clamped_and_zero_needs_damping() -> None:
    given_var = torch.tensor([-1.0, 0.0, 2.0])
    q = DiagonalGaussian({"w": torch.zeros(3)}, {"w": given_var}, damping=0.5)
    assert q.var["w"].tolist() == [0, 0, 2]
    assert given_var.tolist() == [-1, 0, 2]
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(3))
    assert q.log_prob(module).item() == pytest.approx(-0.5 * (2 + 2 + 1 / 2.5))
    with pytest.raises(PosteriorError, match="needs damping"):
        DiagonalGaussian({"w": torch.zeros(3)}, {"w": given_var}, damping=0)
    DiagonalGaussian({"w": torch.zeros(3)}, {"w": torch.ones(3)}, damping=0)


def test_is_frozen() -> None:
    model = network()
    mean = dict(model.named_parameters())
    var = {k: torch.ones_like(p) for k, p in mean.items()}
    buffers = dict(model.named_buffers())
    q = DiagonalGaussian(mean, var, buffers=buffers)
    before = {**{k: v.clone() for k, v in q.mean.items()}, **{f"b.{k}": v.clone() for k, v in q.buffers.items()}}
    with torch.no_grad():
        for tensor in [*mean.values(), *var.values(), *buffers.values()]:
            tensor.add_(1)
    mean.clear()
    assert all(torch.equal(v, before[k]) for k, v in q.mean.items())
    assert all((v == 1).all() for v in q.var.values())
    assert all(torch.equal(v, before[f"b.{k}"]) for k, v in q.buffers.items())
    assert not any(v.requires_grad for v in [*q.mean.values(), *q.var.values()])
    for name in ("mean", "var", "damping", "buffers", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, name, {})
    for mapping in (q.mean, q.var, q.buffers):
        with pytest.raises(TypeError):
            mapping["fc.weight"] = torch.zeros(1)
        with pytest.raises(TypeError):
            del mapping["fc.weight"]


def test_expanded_variance_is_copied_too() -> None:
    one = torch.ones(())
    q = DiagonalGaussian({"w": torch.zeros(3, 2)}, {"w": one.expand(3, 2)})
    one.fill_(9)
    assert torch.equal(q.var["w"], torch.ones(3, 2))


@pytest.mark.parametrize("make", [WithScalar, network, lambda: network("vit")])
def test_isotropic(make: object) -> None:
    model = make()
    q = DiagonalGaussian.isotropic(model, std=0.2)
    assert q.damping == 0
    assert list(q.mean) == list(q.var) == [k for k, _ in model.named_parameters()]
    assert q.buffers.keys() == dict(model.named_buffers()).keys()
    for k, p in model.named_parameters():
        assert torch.equal(q.mean[k], p)
        assert torch.allclose(q.var[k], torch.full_like(p, 0.04))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1)
    count = sum(p.numel() for p in model.parameters())
    assert q.log_prob(moved).item() == pytest.approx(-0.5 * count * 0.01 / 0.04, rel=1e-4)


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf])
def test_bad_std(std: float) -> None:
    with pytest.raises(PosteriorError, match="std must be"):
        DiagonalGaussian.isotropic(nn.Linear(1, 1), std=std)


# ---------------------------------------------------------------- log_prob


@pytest.mark.parametrize("damping", [1e-6, 0.3])
def test_log_prob_and_its_gradient(damping: float) -> None:
    model = network("vit", torch.float64)
    q = gaussian(model, damping=damping)
    params = {k: p.detach().numpy() for k, p in model.named_parameters()}
    value, grads = negative_log_prior(
        params, {k: v.numpy() for k, v in q.mean.items()}, {k: v.numpy() for k, v in q.var.items()}, damping
    )
    plain = -0.5 * sum(((p - q.mean[k]) ** 2 / (q.var[k] + damping)).sum() for k, p in model.named_parameters())
    by_autograd = torch.autograd.grad(plain, list(model.parameters()))
    log_prob = q.log_prob(model)
    assert log_prob.item() == pytest.approx(-value, rel=1e-12)
    assert log_prob.item() == pytest.approx(plain.item(), rel=1e-12)
    (3 * log_prob).backward()
    for (k, p), expected in zip(model.named_parameters(), by_autograd, strict=True):
        np.testing.assert_allclose(p.grad, -3 * grads[k], rtol=1e-10)
        np.testing.assert_allclose(p.grad, 3 * expected, rtol=1e-10)
    assert all(v.grad is None and not v.requires_grad for v in [*q.mean.values(), *q.var.values()])
    assert all(torch.equal(torch.tensor(params[k]), p) for k, p in model.named_parameters())


class Given(nn.Module):
    """A network whose parameters are the given tensors, so that gradcheck can move them."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def test_gradcheck() -> None:
    model = nn.Linear(3, 2).double()
    q = gaussian(model, damping=0.1)
    inputs = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(lambda weight, bias: q.log_prob(Given(weight=weight, bias=bias)), inputs)
    assert torch.autograd.gradgradcheck(lambda weight, bias: q.log_prob(Given(weight=weight, bias=bias)), inputs)


def test_a_constructor_fed_with_parameters_gets_no_gradients() -> None:
    model = network()
    mean = dict(model.named_parameters())
    var = {k: torch.ones_like(p, requires_grad=True) for k, p in mean.items()}
    q = DiagonalGaussian(mean, var)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.bias.add_(1)
    q.log_prob(other).backward()
    assert other.fc.bias.grad is not None
    assert all(p.grad is None for p in [*mean.values(), *var.values()])


def test_log_prob_of_frozen_parameters_and_of_a_part() -> None:
    model = network()
    q = gaussian(model)
    model.requires_grad_(False)
    assert not q.log_prob(model).requires_grad
    model.fc.weight.requires_grad_(True)
    q.log_prob(model).backward()
    assert [k for k, p in model.named_parameters() if p.grad is not None] == ["fc.weight"]


def test_log_prob_of_another_network_names_the_differences() -> None:
    q = gaussian(nn.Linear(3, 2))
    with pytest.raises(PosteriorError, match=r"'weight' is \[2, 3\] in the posterior and \[5, 4\] in the network"):
        q.log_prob(nn.Linear(4, 5))
    with pytest.raises(PosteriorError, match="'bias' is only in the posterior"):
        q.log_prob(nn.Linear(3, 2, bias=False))
    with pytest.raises(PosteriorError, match="'weight' is only in the network"):
        DiagonalGaussian({"bias": torch.ones(2)}, {"bias": torch.ones(2)}).log_prob(nn.Linear(3, 2))


def test_buffers_that_do_not_fit_are_named() -> None:
    model = network()
    fitting = gaussian(model, buffers=dict(model.named_buffers()))
    fitting.check(model)
    for value in (torch.zeros(9), torch.zeros(1)):  # the second would broadcast
        q = gaussian(model, buffers={"norm1.running_mean": value})
        with pytest.raises(PosteriorError, match=r"'norm1\.running_mean' is"):
            petal.Petal(model, q)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapped_network_goes_by_its_own_names(wrap: object) -> None:
    model = without_dropout()
    q = fit_swag(model, loader(2), epochs=1, lr=0.1)
    wrapped = wrap(model)
    assert q.log_prob(wrapped).item() == q.log_prob(model).item()
    assert DiagonalGaussian.isotropic(wrapped, 0.1).mean.keys() == q.mean.keys()
    again = fit_swag(wrapped, loader(2), epochs=1, lr=0.1)
    assert all(torch.equal(v, q.mean[k]) for k, v in again.mean.items())
    adapter = petal.Petal(wrapped, q, views=0)
    assert [k for k, _ in adapter.model.named_parameters()] == list(q.mean)
    assert torch.equal(adapter(images()), petal.Petal(model, q, views=0)(images()))


def test_order_of_names_does_not_matter() -> None:
    model = network()
    q = gaussian(model)
    turned = DiagonalGaussian(dict(reversed(q.mean.items())), dict(q.var))
    assert turned.log_prob(model).item() == pytest.approx(q.log_prob(model).item(), rel=1e-6)


def test_to() -> None:
    model = network()
    q = gaussian(model, damping=0.25, buffers=dict(model.named_buffers()))
    assert q.to() is q
    assert q.to("cpu", torch.float32) is q
    double = q.to(dtype=torch.float64)
    assert double.damping == 0.25
    assert all(torch.equal(v, q.mean[k].double()) for k, v in double.mean.items())
    assert all(torch.equal(v, q.var[k].double()) for k, v in double.var.items())
    assert double.buffers["norm1.running_mean"].dtype == torch.float64
    assert double.buffers["norm1.num_batches_tracked"].dtype == torch.int64
    assert all(v.dtype == torch.float32 for v in q.mean.values())
    assert double.log_prob(model.double()).item() == pytest.approx(q.log_prob(model.float()).item(), rel=1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        double.damping = 1.0


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_save_and_load_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network("batch-norm", dtype)
    q = gaussian(model.float(), damping=0.1 + 0.2, buffers=dict(model.named_buffers())).to(dtype=dtype)
    q.save(tmp_path / "q.safetensors")
    back = DiagonalGaussian.load(str(tmp_path / "q.safetensors"))
    assert back.damping == 0.1 + 0.2
    for kind in ("mean", "var", "buffers"):
        mine, theirs = getattr(q, kind), getattr(back, kind)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) and mine[k].dtype == theirs[k].dtype for k in mine)
    assert os.listdir(tmp_path) == ["q.safetensors"]
    keys = load_file(tmp_path / "q.safetensors").keys()
    assert {"mean.fc.weight", "var.fc.weight", "buffer.norm1.running_var"} <= keys
    with safe_open(tmp_path / "q.safetensors", "pt") as file:
        assert json.loads(file.metadata()["damping"]) == 0.1 + 0.2


def test_an_isotropic_posterior_and_a_channels_last_one_can_be_saved(tmp_path: Path) -> None:
    for model in (network().to(memory_format=torch.channels_last), WithScalar()):
        q = DiagonalGaussian.isotropic(model, std=0.5)
        q.save(tmp_path / "q")
        back = DiagonalGaussian.load(tmp_path / "q")
        assert all(torch.equal(back.mean[k], v) and torch.equal(back.var[k], q.var[k]) for k, v in q.mean.items())


def test_the_file_is_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    gaussian(nn.Linear(2, 2)).save(tmp_path / "q")
    assert (tmp_path / "q").stat().st_mode == (tmp_path / "plain").stat().st_mode


def write(path: Path, tensors: dict[str, Tensor], damping: str = "1e-6", form: str = "petal-posterior-1") -> None:
    save_file(tensors, path, metadata={"format": form, "damping": damping})


GOOD = {"mean.w": torch.ones(2), "mean.v": torch.ones(3), "var.w": torch.ones(2), "var.v": torch.ones(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"var.v": None}, "'v' is only in the mean"),
        ({"var.x": torch.ones(1)}, "'x' is only in the variance"),
        ({"mean.w": torch.ones(2, 1)}, r"'w' is \[2, 1\] in the mean"),
        ({"other.w": torch.ones(1)}, "other.w"),
        ({"mean": torch.ones(1)}, "'mean'"),
        ({"mean.w": torch.tensor([1.0, math.nan])}, "'w'"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    write(tmp_path / "q", {k: v for k, v in (GOOD | change).items() if v is not None})
    with pytest.raises(PosteriorError, match=message) as raised:
        DiagonalGaussian.load(tmp_path / "q")
    assert str(tmp_path / "q") in str(raised.value)


@pytest.mark.parametrize("damping", ["", "null", "[1]", "NaN", "-1", "x"])
def test_bad_damping_in_a_file(tmp_path: Path, damping: str) -> None:
    write(tmp_path / "q", GOOD, damping)
    with pytest.raises(PosteriorError, match="q"):
        DiagonalGaussian.load(tmp_path / "q")


def test_foreign_and_broken_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "q", GOOD)
    whole = (tmp_path / "q").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(PosteriorError, match="cut"):
            DiagonalGaussian.load(tmp_path / "cut")
    (tmp_path / "text").write_text("hello " * 100)
    save_file(GOOD, tmp_path / "foreign")
    write(tmp_path / "newer", GOOD, form="petal-posterior-2")
    torch.save(GOOD, tmp_path / "pickle")
    for name in ("text", "foreign", "newer", "pickle", "missing"):
        with pytest.raises(PosteriorError, match=name):
            DiagonalGaussian.load(tmp_path / name)
    with pytest.raises(PosteriorError):
        DiagonalGaussian.load(tmp_path)
    save_file(GOOD, tmp_path / "half", metadata={"format": "petal-posterior-1"})
    with pytest.raises(PosteriorError, match="damping"):
        DiagonalGaussian.load(tmp_path / "half")


def test_a_failed_save_is_an_error_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = gaussian(nn.Linear(2, 2))
    with pytest.raises(PosteriorError, match="none"):
        q.save(tmp_path / "none" / "q")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PosteriorError, match="folder"):
        q.save(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    assert os.listdir(tmp_path) == []
    q.save(tmp_path / "q")
    old = (tmp_path / "q").read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("petal.posterior.save_file", full)
    with pytest.raises(PosteriorError, match="No space left"):
        gaussian(nn.Linear(2, 2), seed=1).save(tmp_path / "q")
    assert (tmp_path / "q").read_bytes() == old
    assert os.listdir(tmp_path) == ["q"]


def test_unwritable_folder(tmp_path: Path) -> None:
    folder = Path("/proc") if os.geteuid() == 0 else tmp_path  # root writes everywhere else
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PosteriorError, match="cannot write the posterior"):
            gaussian(nn.Linear(2, 2)).save(folder / "q")
    finally:
        tmp_path.chmod(0o700)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- moments


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
        ([(X, Y)], {"snapshots_per_epoch": 2}, "2 snapshots an epoch do not fit into 1"),
        ([(X, torch.tensor([0, 1, 2, 5]))], {}, r"batch 1 of epoch 1 has labels.*\[0, 1, 2, 5\]"),
        ([(X, torch.tensor([0, 1, 2, -100]))], {}, "batch 1 of epoch 1 has labels"),
        ([(X, Y[:3])], {}, r"labels of shape \[3\]"),
        ([(X, Y[:, None])], {}, r"labels of shape \[4, 1\]"),
        ([(X, Y), (X, Y.float())], {}, "batch 2 of epoch 1 has labels of type torch.float32"),
        ([(X,)], {}, "not a pair"),
        ([X], {}, "not a pair"),
        ([(X, Y), (X * math.nan, Y)], {}, "the loss is nan in batch 2 of epoch 1"),
        ([(X[:0], Y[:0])], {}, "the loss is nan"),
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


def test_a_network_without_parameters() -> None:
    with pytest.raises(PosteriorError, match="no parameters"):
        fit_swag(nn.Flatten(), [(X, Y)])


def test_petal_starts_from_a_fit() -> None:
    model = network()
    q = fit_swag(model, loader(), epochs=2, lr=0.01)
    adapter = petal.Petal(model, q, views=2)
    assert all(torch.equal(p, q.mean[k]) for k, p in adapter.model.named_parameters())
    assert adapter(images()).shape == (12, 5)
