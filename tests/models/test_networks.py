"""The networks: names, sizes and what they compute, against rules and computations written here."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from petal import models
from petal.errors import ModelError

GOLDEN = Path(__file__).parents[1] / "golden"
Array = NDArray[np.float64]

#: every family, as small as it gets: name, options, side of its images
TINY = [
    ("wrn-10-1", {}, 16),
    ("resnext-29", {"depth": 11, "base_width": 4}, 16),
    ("resnet-50", {"blocks": (1, 1, 1, 1)}, 64),
    ("small", {"width": 8}, 16),
    ("small-gn", {"width": 8}, 16),
    ("vit-tiny", {"depth": 1, "dim": 16}, 32),
]
BATCH_NORM = {"wrn-10-1", "resnext-29", "resnet-50", "small"}


def norm_names(name: str) -> set[str]:
    return {f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def wrn_names(depth: int, width: int) -> set[str]:
    names = {"conv1.weight", "fc.weight", "fc.bias"} | norm_names("bn1")
    for group in (1, 2, 3):
        for index in range((depth - 4) // 6):
            block = f"block{group}.layer.{index}"
            names |= {f"{block}.conv1.weight", f"{block}.conv2.weight"}
            names |= norm_names(f"{block}.bn1") | norm_names(f"{block}.bn2")
            if index == 0 and not (group == 1 and width == 1):
                names.add(f"{block}.convShortcut.weight")
    return names


def resnext_names() -> set[str]:
    names = {"conv_1_3x3.weight", "classifier.weight", "classifier.bias"} | norm_names("bn_1")
    for stage in (1, 2, 3):
        for index in range(3):
            block = f"stage_{stage}.{index}"
            names |= {f"{block}.conv_{part}.weight" for part in ("reduce", "conv", "expand")}
            names |= norm_names(f"{block}.bn_reduce") | norm_names(f"{block}.bn") | norm_names(f"{block}.bn_expand")
        names |= {f"stage_{stage}.0.downsample.0.weight"} | norm_names(f"stage_{stage}.0.downsample.1")
    return names


def resnet50_names() -> set[str]:
    names = {"conv1.weight", "fc.weight", "fc.bias"} | norm_names("bn1")
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for index in range(blocks):
            for part in (1, 2, 3):
                names |= {f"layer{stage}.{index}.conv{part}.weight"} | norm_names(f"layer{stage}.{index}.bn{part}")
        names |= {f"layer{stage}.0.downsample.0.weight"} | norm_names(f"layer{stage}.0.downsample.1")
    return names


def meta(name: str, classes: int = 10, **options: object) -> nn.Module:
    """A network without data: building the large ones costs nothing."""
    with torch.device("meta"):
        return models.build(name, classes=classes, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrn-28-10", wrn_names(28, 10)),
        ("wrn-40-2", wrn_names(40, 2)),
        ("wrn-10-1", wrn_names(10, 1)),
        ("resnext-29", resnext_names()),
        ("resnet-50", resnet50_names()),
    ],
)
def test_key_names_are_those_of_the_published_checkpoints(name: str, expected: set[str]) -> None:
    assert set(meta(name).state_dict()) == expected


@pytest.mark.parametrize(
    ("name", "classes", "options", "published"),
    [
        ("wrn-28-10", 10, {}, 36_479_194),
        ("resnet-50", 1000, {}, 25_557_032),
    ],
)
def test_parameter_counts_are_exactly_the_published_ones(
    name: str, classes: int, options: dict[str, int], published: int
) -> None:
    assert models.count_parameters(meta(name, classes, **options)) == published


@pytest.mark.parametrize(
    ("name", "classes", "options", "millions"),
    [
        ("wrn-40-2", 10, {}, 2.2),  # Wide ResNet paper, table 4
        ("wrn-16-8", 10, {}, 11.0),
        ("resnext-29", 10, {"cardinality": 8, "base_width": 64}, 34.4),  # ResNeXt paper, table 7
        ("resnext-29", 10, {"cardinality": 16, "base_width": 64}, 68.1),
        ("resnext-29", 100, {}, 6.9),  # the network of AugMix's checkpoint
    ],
)
def test_parameter_counts_agree_with_rounded_published_ones(
    name: str, classes: int, options: dict[str, int], millions: float
) -> None:
    assert models.count_parameters(meta(name, classes, **options)) / 1e6 == pytest.approx(millions, abs=0.06)


def test_shapes_of_the_augmix_resnext() -> None:
    state = meta("resnext-29", 100).state_dict()
    assert state["stage_1.0.conv_conv.weight"].shape == (128, 32, 3, 3)  # 4 groups of 32
    assert state["stage_3.2.conv_conv.weight"].shape == (512, 128, 3, 3)
    assert state["stage_2.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    assert state["classifier.weight"].shape == (100, 1024)


# What a WRN computes, in plain NumPy.


def conv(x: Array, weight: Array, stride: int) -> Array:
    pad = weight.shape[-1] // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    out: Array = np.einsum("nchwij,ocij->nohw", windows, weight, optimize=True)
    return out


def norm_relu(x: Array, state: dict[str, Array], name: str, batch_statistics: bool) -> Array:
    if batch_statistics:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    else:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    scale = state[f"{name}.weight"] / np.sqrt(var + 1e-5)
    shift = state[f"{name}.bias"] - mean * scale
    return np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)


def wrn_forward(x: Array, state: dict[str, Array], batch_statistics: bool) -> Array:
    x = conv(x, state["conv1.weight"], 1)
    for group, stride in ((1, 1), (2, 2), (3, 2)):
        block = f"block{group}.layer.0"
        active = norm_relu(x, state, f"{block}.bn1", batch_statistics)
        y = conv(active, state[f"{block}.conv1.weight"], stride)
        y = conv(norm_relu(y, state, f"{block}.bn2", batch_statistics), state[f"{block}.conv2.weight"], 1)
        if f"{block}.convShortcut.weight" in state:
            x = conv(active, state[f"{block}.convShortcut.weight"], stride)  # of the activated input
        x = x + y
    x = norm_relu(x, state, "bn1", batch_statistics).mean((2, 3))
    return x @ state["fc.weight"].T + state["fc.bias"]


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return {key: value.double() for key, value in load_file(GOLDEN / "inputs.safetensors").items()}


def golden_wrn(golden: dict[str, torch.Tensor]) -> nn.Module:
    model = models.build("wrn-10-1").double()
    state = {key.removeprefix("source."): value for key, value in golden.items() if key.startswith("source.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing)
    return model


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_wrn_against_numpy(golden: dict[str, torch.Tensor], batch_statistics: bool) -> None:
    model = golden_wrn(golden).train(batch_statistics)
    x = golden["x.0"][:6]
    state = {key.removeprefix("source."): value.numpy() for key, value in golden.items() if key.startswith("source.")}
    with torch.no_grad():
        ours = model(x).numpy()
    np.testing.assert_allclose(ours, wrn_forward(x.numpy(), state, batch_statistics), rtol=0, atol=1e-11)


def test_wrn_against_the_released_code(golden: dict[str, torch.Tensor]) -> None:
    # TENT's first answer is the plain network's, with batch statistics.
    expected = load_file(GOLDEN / "tent.safetensors")["0.logits"].double()
    with torch.no_grad():
        logits = golden_wrn(golden).train()(golden["x.0"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "options", "side"), TINY)
def test_forward_and_backward_reach_every_parameter(name: str, options: dict[str, object], side: int) -> None:
    model = models.build(name, classes=7, seed=0, **options)
    logits = model(torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (4, 7)
    (logits * torch.randn(4, 7, generator=torch.Generator().manual_seed(1))).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == (name in BATCH_NORM)


@pytest.mark.parametrize(("name", "options", "side"), TINY)
def test_layout_precision_copies_and_compilation(name: str, options: dict[str, object], side: int) -> None:
    model = models.build(name, seed=0, **options).eval()
    x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(x)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-4)
        double = copy.deepcopy(model).double()(x.double())
        assert double.dtype == torch.float64
        torch.testing.assert_close(double.float(), plain, rtol=1e-3, atol=1e-4)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), plain)
    torch.compiler.reset()


def test_normalisation_keeps_the_memory_format() -> None:
    x = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert models.Normalize((0.5,) * 3, (0.2,) * 3)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["wrn-10-1", "small", "small-gn"])
@pytest.mark.parametrize("side", [8, 24, 40])
def test_convolutional_networks_take_any_size(name: str, side: int) -> None:
    assert models.build(name, classes=3)(torch.rand(2, 3, side, side)).shape == (2, 3)


def test_vit_says_which_size_it_takes() -> None:
    assert models.build("vit-tiny", image_size=16, depth=1, dim=16)(torch.rand(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(ModelError, match=r"32 pixels, not \(16, 16\).*image_size"):
        models.build("vit-tiny", depth=1, dim=16)(torch.rand(2, 3, 16, 16))


def test_vit_has_parameters_not_called_weight_or_bias() -> None:
    names = dict(meta("vit-tiny").named_parameters())
    assert {"cls_token", "pos_embed", "blocks.0.attn.in_proj_weight"} <= names.keys()


@pytest.mark.parametrize(
    ("name", "side", "mean", "std"),
    [
        ("resnext-29", 16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ("resnet-50", 64, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
)
def test_normalisation_is_part_of_the_network(
    name: str, side: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    options: dict[str, object] = dict({key: opts for key, opts, _ in TINY}[name])
    with_it = models.build(name, seed=0, **options).eval()
    without = models.build(name, seed=0, mean=None, std=None, **options).eval()
    x = torch.rand(2, 3, side, side)
    by_hand = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(with_it(x), without(by_hand), rtol=1e-4, atol=1e-4)
    assert with_it.state_dict().keys() == without.state_dict().keys()
    assert with_it.double().normalize.mean.dtype == torch.float64


def test_dropout_acts_in_training_only() -> None:
    model = models.build("wrn-10-1", dropout=0.5, seed=0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    x = torch.rand(2, 3, 16, 16)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(("name", "steps"), [("small", 30), ("small-gn", 40), ("wrn-10-1", 30)])
def test_trainable_from_scratch(name: str, steps: int) -> None:
    # Four classes: where in the image the bright patch is, left or right, and its colour.
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (64,), generator=generator)
    x = 0.3 * torch.rand(64, 3, 16, 16, generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        image[label // 2, 4:12, 4:12] += 0.5
        image[2, :, 8 * (label % 2) : 8 * (label % 2) + 8] += 0.4
    model = models.build(name, classes=4, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.35  # chance: 1.39


def test_small_networks_are_small() -> None:
    counts = {name: models.count_parameters(meta(name)) for name in ("small", "small-gn")}
    assert counts["small"] == counts["small-gn"]
    assert 50_000 < counts["small"] < 100_000


@pytest.mark.parametrize(
    ("mean", "std"),
    [((0.5,), None), (None, (0.5,)), ((0.5, 0.5), (0.5,)), ((0.5,), (0.0,)), ((0.5,) * 3, (0.5, -1, 1))],
)
def test_impossible_normalisation(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    with pytest.raises(ModelError, match="normalisation"):
        models.Normalize(mean, std)
