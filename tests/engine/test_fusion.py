"""Fused convolutions and batch norms: the operators against NumPy, the pass against networks without it."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import petal
from petal.engine import Policy, convolution, normalise, policy_for
from petal.engine.fusion import FuseConvolutions, fastest_columns


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def direct(x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The convolution by its definition, in float64."""
    images = np.pad(x.double().numpy(), ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    filters = weight.double().numpy()
    windows = np.lib.stride_tricks.sliding_window_view(images, filters.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwij,ocij->nohw", windows, filters)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [((3, 3), 1, (1, 1)), ((3, 3), 2, (1, 1)), ((1, 3), 2, (0, 1))])
@pytest.mark.parametrize("residual", [False, True])
def test_operator_against_the_definition(
    kernel: tuple[int, int], stride: int, padding: tuple[int, int], residual: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    x = last(torch.randn(5, 16, 11, 9, generator=random).bfloat16())
    weight = last(torch.randn(32, 16, *kernel, generator=random).bfloat16())
    expected = direct(x, weight, stride, padding)
    other = last(torch.randn(expected.shape, generator=random).bfloat16()) if residual else None
    out, sums = convolution.convolution(x, weight, other, stride, padding, True, 64)
    if other is not None:
        expected = expected + other.double().numpy()
    assert out.shape == expected.shape
    assert out.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(out.double().numpy(), expected, atol=0.15, rtol=1e-2)
    pixels = out.double().numpy().transpose(1, 0, 2, 3).reshape(32, -1)
    total = sums.double().sum(0).numpy()
    np.testing.assert_allclose(total[0], pixels.sum(1), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(total[1], np.square(pixels).sum(1), rtol=1e-4)
    assert len(convolution.convolution(x, weight, other, stride, padding, False, 64)[1]) == 0


def test_tiles_cover_every_pixel_once_and_use_halves_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_processors", lambda device: 132)
    tiles = {}
    maps = [(204800, 160, 160), (51200, 320, 160), (12800, 640, 128), (1024, 160, 160), (1, 64, 64)]
    for pixels, channels, columns in maps:
        whole, halves = convolution._row_tiles(torch.empty(pixels, channels, 1, 1, device="meta"), columns)
        assert 0 <= whole * 256 + halves * 128 - pixels < 256
        tiles[pixels] = (whole, halves)
    assert tiles[204800] == (792, 16)       # six rounds of 132 and half a one, not seven
    assert tiles[12800] == (50, 0)
    assert tiles[1024] == (0, 8)            # a small batch keeps more multiprocessors busy so


def test_what_the_kernel_can_do_is_said_beforehand() -> None:
    def fits(images: tuple[int, ...], filters: tuple[int, ...], dtype: torch.dtype = torch.float16) -> bool:
        out = torch.zeros(images[0], filters[0], *images[2:], dtype=dtype)
        return convolution.fits(last(torch.zeros(images, dtype=dtype)), last(torch.zeros(filters, dtype=dtype)), out)

    assert fits((8, 32, 32, 32), (64, 32, 3, 3))
    assert not fits((8, 24, 32, 32), (64, 24, 3, 3))                    # a product takes 16 channels
    assert not fits((8, 32, 32, 32), (40, 32, 3, 3))                    # results are written by 32
    assert not fits((8, 32, 32, 32), (64, 16, 3, 3))                    # groups
    assert not fits((1, 32, 8, 8), (64, 32, 3, 3))                      # too small to be described to the copy engine
    assert not fits((8, 32, 32, 32), (64, 32, 3, 3), torch.float32)
    large, small = torch.zeros(8, 32, 32, 32).half(), torch.zeros(8, 64, 8, 8).half()
    assert not convolution.fits(large, last(torch.zeros(64, 32, 3, 3).half()), large)
    assert not convolution.fits(last(large), last(torch.zeros(64, 32, 3, 3).half()), small)
    assert convolution.widths(torch.zeros(320, 320, 3, 3).half()) == [160, 128, 96, 64]
    assert convolution.widths(torch.zeros(160, 16, 3, 3).half()) == [160]   # nothing beyond a small filter may be read


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_normalise_against_batch_norm(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x = last((torch.randn(4, 64, 6, 5, generator=random) * 3 + 2).to(dtype))
    weight, bias = torch.randn(2, 64, generator=random)
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0, keepdim=True)
    expected = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True, eps=1e-5).relu()
    got = torch.ops.petal.normalise(x, mean, (var + 1e-5).rsqrt(), weight, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=2 ** -8, atol=1e-3)


# The pass


class Recorded(FuseConvolutions):
    """The pass with a fixed choice, that keeps what it has made."""

    def __init__(self, choose: Callable[..., int] = lambda *_: 64) -> None:
        super().__init__(choose)
        self.made: list[Counter[str]] = []
        self.calls: list[fx.Node] = []

    def uuid(self) -> None:
        """Not to be found in a cache."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        self.made.append(Counter(str(node.target) for node in graph.nodes))
        self.calls += [node for node in graph.nodes if node.target == torch.ops.petal.convolution.default]


def compiled(network: nn.Module, fuse: FuseConvolutions | None) -> Any:
    options = {} if fuse is None else {"post_grad_custom_post_pass": fuse}
    return Policy(measured_options=options).compiler(network)


def learned(network: nn.Module, run: Any, x: Tensor, low: bool = True) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of a loss by all parameters."""
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        logits = run(x).float()
    grads = torch.autograd.grad(F.cross_entropy(logits, torch.arange(len(x)) % 10), list(network.parameters()))
    return logits.detach(), torch.cat([g.flatten() for g in grads])


def test_a_network_with_fused_convolutions_gives_and_learns_the_same() -> None:
    network = petal.CoTTA(petal.models.build("wrn-10-4", classes=10, seed=0)).model.to(memory_format=torch.channels_last)
    x = last(torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    exact, exact_grad = learned(network, network, x, low=False)
    fuse = Recorded()
    logits, grad = learned(network, compiled(network, fuse), x)
    forward = fuse.made[0]
    assert forward["petal.convolution.default"] == 9         # all but the first, which reads three channels
    assert forward["aten.convolution.default"] == 1
    assert forward["petal.normalise.default"] == 5           # not that of 16 channels, nor the last, which no one convolves
    assert forward["aten.var_mean.correction"] == 1
    assert sum(node.args[2] is not None for node in fuse.calls) == 3        # residual sums
    plain, plain_grad = learned(network, compiled(network, None), x)
    assert (logits - exact).norm() < 1.5 * (plain - exact).norm()           # no more than low precision costs anyway
    assert (grad - exact_grad).norm() < 1.5 * (plain_grad - exact_grad).norm()


class Odd(nn.Module):
    """Convolutions that have to stay as they are, and one that has not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Conv2d(64, 64, 3, padding=1)
        self.groups = nn.Conv2d(64, 64, 3, padding=1, groups=2, bias=False)
        self.dilated = nn.Conv2d(64, 64, 3, padding=2, dilation=2, bias=False)
        self.uneven = nn.Conv2d(64, 64, 3, padding=1, stride=(2, 1), bias=False)
        self.backwards = nn.ConvTranspose2d(64, 64, 3, bias=False)
        self.plain = nn.Conv2d(64, 64, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.bias, self.groups, self.dilated, self.uneven, self.backwards, self.plain):
            x = layer(x)
        return x


def test_other_convolutions_are_left_alone() -> None:
    torch.manual_seed(0)
    network, fuse = Odd().to(memory_format=torch.channels_last).requires_grad_(False), Recorded()
    x = last(torch.rand(16, 64, 16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(network, fuse)(x), network(x)
    assert fuse.made[0]["petal.convolution.default"] == 1
    assert fuse.made[0]["aten.convolution.default"] == 5
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)


def test_a_sum_with_something_else_is_no_residual() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Conv2d(32, 64, 3, bias=False) for _ in range(2))

        def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
            doubled = self.two(x)
            return self.one(x) + shift, doubled + doubled

    torch.manual_seed(0)
    network, fuse = Sums().to(memory_format=torch.channels_last).requires_grad_(False), Recorded()
    x, shift = last(torch.rand(8, 32, 32, 32)), last(torch.rand(1, 64, 30, 30).bfloat16())      # one for all images
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(network, fuse)(x, shift), network(x, shift)
    assert [node.args[2] for node in fuse.calls] == [None, None]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def test_nothing_is_measured_for_who_wants_the_same_numbers_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_for(torch.device("cuda"))
    taken: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **keywords: taken.append(keywords["options"]))
    policy.compiler(print)
    policy.compiler(print, alike=True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    policy.compiler(print)
    assert [options is not None and "post_grad_custom_post_pass" in options for options in taken] == [True, False, False]


def test_the_kernel_is_for_hopper_alone() -> None:
    x, weight = last(torch.zeros(8, 32, 32, 32).half()), last(torch.zeros(64, 32, 3, 3).half())
    assert fastest_columns(x, weight, 1, (1, 1), False, True) == 0


def test_a_kernel_that_cannot_be_compiled_is_replaced_by_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise convolution.KernelError("no such compiler")

    monkeypatch.setattr(convolution, "_function", broken)
    x, weight = last(torch.rand(2, 32, 9, 9).bfloat16()), last(torch.rand(64, 32, 3, 3).bfloat16())
    with caplog.at_level(logging.WARNING):
        out, sums = convolution._launch(x, weight, None, 1, (1, 1), True, 64)
    torch.testing.assert_close(out, F.conv2d(x, weight, padding=1))
    torch.testing.assert_close(sums.sum(0)[0], out.float().sum((0, 2, 3)))
    assert "no such compiler" in caplog.text


# The kernels themselves


SHAPES = [  # images, channels, size, results, kernel, stride, padding
    (200, 160, 32, 160, 3, 1, 1), (200, 320, 16, 320, 3, 1, 1), (200, 640, 8, 640, 3, 1, 1), (200, 160, 32, 320, 3, 2, 1),
    (200, 160, 32, 320, 1, 2, 0), (200, 16, 32, 160, 3, 1, 1), (7, 160, 32, 160, 3, 1, 1), (3, 96, 56, 64, 3, 1, 1),
    (13, 80, 9, 96, 3, 1, 1), (64, 256, 14, 1024, 1, 1, 0), (1, 160, 32, 160, 3, 1, 1),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_agrees_with_its_twin_on_the_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    count, channels, size, outputs, kernel, stride, padding = shape
    x = last(torch.randn(count, channels, size, size, device="cuda").to(dtype))
    weight = torch.randn(outputs, channels, kernel, kernel, device="cuda") / (channels * kernel**2) ** 0.5
    room = torch.empty(weight.numel() + 1, device="cuda", dtype=dtype)[1:]         # a view that begins anywhere
    weight = room.view(outputs, kernel, kernel, channels).permute(0, 3, 1, 2).copy_(weight)
    exact = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    assert convolution.fits(x, weight, exact.to(dtype))
    for columns in convolution.widths(weight):
        for residual in (None, last(torch.randn(exact.shape, device="cuda").to(dtype))):
            out, sums = convolution.convolution(x, weight, residual, stride, (padding, padding), True, columns)
            expected = exact if residual is None else exact + residual.double()
            assert (out.double() - expected).norm() < 2e-3 * expected.norm() * (8 if dtype == torch.bfloat16 else 1)
            total = sums.double().sum(0)
            spread = expected.square().sum((0, 2, 3))
            assert (total[0] - expected.sum((0, 2, 3))).abs().max() < 1e-3 * (spread * expected[:, 0].numel()).sqrt().max()
            assert (total[1] / spread - 1).abs().max() < 1e-3
            again = convolution.convolution(x, weight, residual, stride, (padding, padding), True, columns)
            assert torch.equal(again[0], out)
            assert torch.equal(again[1], sums)


@pytest.mark.gpu
def test_normalise_agrees_with_its_twin_on_the_gpu() -> None:
    for count, channels, size in [(200, 160, 32), (3, 32, 7), (1, 640, 1)]:
        x = last(torch.randn(count, channels, size, size, device="cuda").half())
        constants = torch.randn(4, channels, device="cuda").unbind()
        got, expected = torch.ops.petal.normalise(x, *constants), normalise._plain(x, *constants)
        torch.testing.assert_close(got, expected, rtol=2**-9, atol=1e-5)
