"""The source posterior against NumPy and plain autograd."""

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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import petal
from networks import images, network
from oracle.algorithm import negative_log_prior
from petal import DiagonalGaussian, PosteriorError


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
        assert q.var[k].untyped_storage().nbytes() == p.element_size()      # one number, however large the parameter
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
    model = network()
    q = gaussian(model)
    wrapped = wrap(model)
    assert q.log_prob(wrapped).item() == q.log_prob(model).item()
    assert DiagonalGaussian.isotropic(wrapped, 0.1).mean.keys() == q.mean.keys()
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


def test_petal_takes_a_posterior_in_another_precision() -> None:
    """A float64 posterior and a float32 network: everything of the method is float32, and as if q had been so."""
    model = network()
    q = gaussian(model, buffers=dict(model.named_buffers()))
    double = q.to(dtype=torch.float64)
    first, second = (petal.Petal(model, p, views=0, prior_weight=1e-3, lr=1e-2) for p in (q, double))
    held = [*second.posterior.mean.values(), *second.posterior.var.values()]
    weights = [p for net in (second.model, second.teacher, second.source) for p in net.parameters()]
    assert {v.dtype for v in (*held, *weights)} == {torch.float32}
    for seed in range(3):
        assert torch.equal(first(images(seed=seed)), second(images(seed=seed)))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert all(v.dtype == torch.float64 for v in double.mean.values())


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

    monkeypatch.setattr("petal._files.save_file", full)
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
