"""Batch-statistics mode and the choice of affine parameters."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from networks import images, network
from petal import BatchNorm, InputError
from petal.norm import (
    Following,
    MixedNorm,
    RecentNorm,
    RobustNorm,
    affine_parameters,
    batch_norms,
    following,
    instance_aware,
    network_copy,
    replaced,
    unwrapped,
)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(4)
        self.instance = nn.InstanceNorm2d(3, affine=True)
        self.plain = nn.BatchNorm2d(3, affine=False)
        self.linear = nn.Linear(2, 2)
        self.again = self.bn1


def test_which_layers_and_parameters() -> None:
    model = Everything()
    assert [n for n, _ in batch_norms(model)] == ["bn1", "inner.0", "inner.1", "inner.2", "plain"]
    layers = ["bn1", "inner.0", "inner.1", "inner.2", "group", "layer"]
    chosen = affine_parameters(model)
    assert list(chosen) == [f"{n}.{kind}" for n in layers for kind in ("weight", "bias")]
    own = dict(model.named_parameters())
    assert all(p is own[name] for name, p in chosen.items())
    assert list(affine_parameters(nn.LayerNorm(3))) == ["weight", "bias"]
    assert list(affine_parameters(nn.LayerNorm(3, bias=False))) == ["weight"]


def normalised(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    axes = (0, *range(2, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 5)), (nn.BatchNorm2d, (2, 3, 4, 5)),
     (nn.BatchNorm3d, (2, 3, 2, 2, 2)), (nn.SyncBatchNorm, (4, 3, 2, 2))],
)  # fmt: skip
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracks", [True, False])
def test_normalises_by_the_batch_in_every_mode(
    layer: type[nn.Module], shape: tuple[int, ...], momentum: float | None, tracks: bool
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 7
    model = nn.Sequential(layer(3, momentum=momentum, track_running_stats=tracks)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -2.0, 3.0]))
        model[0].bias.copy_(torch.tensor([0.5, 0.0, -1.0]))
    per_channel = (1, 3, *[1] * (len(shape) - 2))
    scale, shift = (p.detach().numpy().reshape(per_channel) for p in model.parameters())
    expected = normalised(x.numpy()) * scale + shift
    copied = network_copy(model, batch_statistics=True)
    for _ in range(2):
        np.testing.assert_allclose(copied(x), expected, atol=1e-10)
    if layer is not nn.SyncBatchNorm:  # which wants a GPU to train
        np.testing.assert_allclose(copied.train()(x), expected, atol=1e-10)
    assert not dict(copied.named_buffers())


def test_without_batch_statistics_the_running_ones_are_used() -> None:
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    copied = network_copy(model, batch_statistics=False)
    assert not any(m.training for m in copied.modules())
    assert not any(p.requires_grad for p in copied.parameters())
    assert torch.equal(copied(images()), copy.deepcopy(model).eval()(images()))
    assert all(torch.equal(v, before[k]) for k, v in copied.state_dict().items())
    assert all(m.training for m in model.modules())
    assert not torch.allclose(network_copy(model, True)(images()), copied(images()), atol=1e-3)


def test_one_value_a_channel_is_refused_by_name_and_two_are_not() -> None:
    model = network_copy(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), batch_statistics=True)
    with pytest.raises(InputError, match=r"batch norm '1' sees one value a channel \(its input is \[1, 3\]\)"):
        model(torch.rand(1, 2))
    assert model(torch.rand(2, 2)).isfinite().all()
    spatial = network_copy(nn.Sequential(nn.BatchNorm2d(3)), batch_statistics=True)
    assert spatial(torch.rand(1, 3, 1, 2)).isfinite().all()
    with pytest.raises(InputError):
        spatial(torch.rand(1, 3, 1, 1))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(input=x).mean((2, 3)))


def test_a_network_that_calls_its_layers_by_keyword() -> None:
    model = ByKeyword().double().eval()
    x = images(dtype=torch.float64)
    expected = normalised(x.numpy()).mean((2, 3)) @ model.fc.weight.detach().numpy().T + model.fc.bias.detach().numpy()
    np.testing.assert_allclose(BatchNorm(model)(x), expected, atol=1e-10)


def test_a_copy_of_a_copy_works_by_itself() -> None:
    first = network_copy(network(), batch_statistics=True)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.norm1.weight.zero_()
    assert not torch.equal(first(images()), second(images()))


@pytest.mark.parametrize("batch_statistics", [True, False])
def test_a_network_built_in_inference_mode_becomes_a_plain_one(batch_statistics: bool) -> None:
    with torch.inference_mode():
        model = network()
    copied = network_copy(model, batch_statistics)
    assert not any(t.is_inference() for t in copied.state_dict().values())
    copied.requires_grad_(True)
    copied(images()).sum().backward()
    assert copied.conv1.weight.grad is not None


def by_hand(x: np.ndarray, mean: np.ndarray, var: np.ndarray, k: float, eps: float = 1e-5) -> np.ndarray:
    """NOTE's eq. 3-6, one channel of one image at a time."""
    out = np.empty_like(x)
    pixels = x[0, 0].size
    for n in range(len(x)):
        for c in range(x.shape[1]):
            own = x[n, c].reshape(-1)
            apart, margin = own.mean() - mean[c], k * np.sqrt((var[c] + eps) / pixels)
            wider, room = own.var(ddof=1) - var[c], k * (var[c] + eps) * np.sqrt(2 / (pixels - 1))
            m = mean[c] + np.sign(apart) * max(abs(apart) - margin, 0)
            v = max(var[c] + np.sign(wider) * max(abs(wider) - room, 0), 0)
            out[n, c] = (x[n, c] - m) / np.sqrt(v + eps)
    return out


def test_instance_aware_norm_predicts_by_running_statistics_and_is_trained_by_those_of_the_batch() -> None:
    layer = nn.BatchNorm2d(3).double().eval()
    layer.running_mean += torch.tensor([0.5, -1.0, 0.0])
    layer.running_var *= torch.tensor([2.0, 0.5, 1.0])
    scales = torch.tensor([0.1, 1.0, 3.0, 0.5, 1.0, 1.0], dtype=torch.float64)[:, None, None, None]
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scales + scales
    running = layer.running_mean.numpy(), layer.running_var.numpy()
    network = instance_aware(nn.Sequential(layer), shrink=1.5)
    np.testing.assert_allclose(network(x).detach(), by_hand(x.numpy(), *running, 1.5), atol=1e-10)
    assert torch.equal(network[0].running_mean, layer.running_mean)
    batch = x.numpy().mean((0, 2, 3)), x.numpy().var((0, 2, 3), ddof=1)
    np.testing.assert_allclose(network.train()(x).detach(), by_hand(x.numpy(), *batch, 1.5), atol=1e-10)
    layer.train()(x)                                                # torch's own moves its statistics the same way
    assert torch.allclose(network[0].running_mean, layer.running_mean, atol=1e-12)
    assert torch.allclose(network[0].running_var, layer.running_var, atol=1e-12)
    by_batch = network_copy(network, batch_statistics=True)
    np.testing.assert_allclose(by_batch(x).detach(), by_hand(x.numpy(), *batch, 1.5), atol=1e-10)
    assert [n for n, _ in batch_norms(network)] == ["0"]


def test_statistics_move_only_while_a_network_is_followed() -> None:
    copied = network_copy(network(), False, lambda layer: RobustNorm(layer, 0.25))
    other = copy.deepcopy(copied)
    before = {key: value.clone() for key, value in copied.named_buffers()}
    plain = network_copy(network(), False)
    assert torch.allclose(copied(images()), plain(images()), atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in copied.named_buffers())
    with following(copied):
        copied(images()), other(images())
    first = copied.conv1(images()).mean((0, 2, 3))
    expected = 0.75 * before["norm1.running_mean"] + 0.25 * first
    assert torch.allclose(copied.norm1.running_mean, expected, atol=1e-6)
    assert torch.equal(other.norm1.running_mean, before["norm1.running_mean"])
    moved = copied.norm2.running_var.clone()
    copied(images(seed=1))
    assert torch.equal(copied.norm2.running_var, moved)


def test_the_users_own_network_inside_any_number_of_wrappers() -> None:
    inner = network()
    for model in (inner, nn.DataParallel(nn.DataParallel(inner)), nn.DataParallel(torch.compile(inner)),
                  torch.compile(nn.DataParallel(inner))):  # fmt: skip
        assert unwrapped(model) is inner


@pytest.mark.parametrize("training", [True, False])
def test_layers_in_place_of_others_are_in_their_mode(training: bool) -> None:
    found = replaced(network().train(training), lambda layer: RobustNorm(layer, 0.1))
    assert [layer.training for _, layer in batch_norms(found)] == [training] * 2


def test_a_window_of_fewer_images_than_classes_is_the_last_image_of_each() -> None:
    x = torch.tensor([[3.0, 1.0], [2.5, -1.0], [2.0, 3.5]], dtype=torch.float64)
    shared = Following(2.0, like=x)
    norm = RecentNorm(nn.BatchNorm1d(2).double().eval(), shared, source=0.0, own=0.0)
    shared.begin(5)
    shared.expect(torch.tensor([0, 0, 3]), shuffled=0.0)
    norm(x)
    expected = torch.zeros(5, 2, dtype=torch.float64)               # of classes not seen, the source's
    for image, label in zip(x, (0, 0, 3), strict=True):
        expected[label] = 0.001 * expected[label] + 0.999 * image
    assert torch.allclose(norm.moved[0, :5], expected, atol=1e-12)


def test_statistics_of_a_batch_in_low_precision_are_taken_in_full() -> None:
    layer = nn.BatchNorm2d(2).eval()
    layer.running_mean.fill_(1001.0)                                # bfloat16 has 1000 and 1004 here
    mixed = MixedNorm(layer, 0.9)
    x = (torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0)) * 30 + 1001).bfloat16()
    torch.testing.assert_close(mixed(x).float(), mixed(x.float()), rtol=2**-8, atol=1e-3)


def test_the_layers_of_a_network_have_one_switch() -> None:
    """Turning it is one operation, whatever the number of layers."""
    copied = network_copy(network(), False, lambda layer: RobustNorm(layer, 0.1))
    switches = {layer.learning.data_ptr() for _, layer in batch_norms(copied)}
    assert len(batch_norms(copied)) == 2
    assert len(switches) == 1
    with following(copied):
        assert all(layer.learning == 1 for _, layer in batch_norms(copied))
    assert all(layer.learning == 0 for _, layer in batch_norms(copied))
