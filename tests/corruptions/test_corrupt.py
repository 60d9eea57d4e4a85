import re

import pytest
import torch

from petal import corruptions
from petal.corruptions import CORRUPTIONS, REGISTRY, VALIDATION_CORRUPTIONS, corrupt, image_keys
from petal.corruptions.constants import CONSTANTS
from petal.errors import DataError

ALL = CORRUPTIONS + VALIDATION_CORRUPTIONS


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_benchmarks_order() -> None:
    assert CORRUPTIONS == (
        "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
        "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    )  # fmt: skip
    assert VALIDATION_CORRUPTIONS == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert all(set(table) == set(REGISTRY) for table in CONSTANTS.values())
    assert all(len(settings) == 5 for table in CONSTANTS.values() for settings in table.values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("profile", ["cifar", "imagenet"])
def test_shape_range_and_input(name: str, profile: str, pictures: torch.Tensor) -> None:
    before = pictures.clone()
    for severity in range(1, 6):
        out = corrupt(pictures, name, severity, profile, generator())
        assert out.shape == pictures.shape
        assert out.dtype == torch.float32
        assert out.min() >= 0
        assert out.max() <= 1
        assert not torch.equal(out, pictures)
        assert out.data_ptr() != pictures.data_ptr()
    assert torch.equal(pictures, before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("profile,severity", [("cifar", 1), ("cifar", 3), ("cifar", 5), ("imagenet", 2), ("imagenet", 5)])
def test_an_image_does_not_depend_on_its_batch(name: str, profile: str, severity: int, pictures: torch.Tensor) -> None:
    keys = image_keys(3, name, severity, range(7))
    together = corrupt(pictures, name, severity, profile, keys=keys)
    alone = torch.cat([corrupt(pictures[i : i + 1], name, severity, profile, keys=keys[i : i + 1]) for i in range(7)])
    assert torch.equal(together, alone)
    assert torch.equal(together[2:5], corrupt(pictures[2:5], name, severity, profile, keys=keys[2:5]))


@pytest.mark.parametrize("name", ALL)
def test_chunks_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch, pictures: torch.Tensor) -> None:
    x = pictures[..., :29, :31]  # rows that end inside a vector register
    whole = corrupt(x, name, 3, generator=generator())
    monkeypatch.setattr(corruptions, "_CHUNK_PIXELS", {"cpu": 2000})
    assert torch.equal(whole, corrupt(x, name, 3, generator=generator()))


@pytest.mark.parametrize("name", [n for n in ALL if n not in {
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
}])  # fmt: skip
def test_random_corruptions_follow_the_key(name: str, pictures: torch.Tensor) -> None:
    x = pictures[:1].expand(3, -1, -1, -1)
    keys = torch.tensor([5, 6, 5])
    out = corrupt(x, name, 5, keys=keys)
    assert torch.equal(out[0], out[2])
    assert not torch.equal(out[0], out[1])


def test_one_key_an_image_is_drawn_from_the_generator(pictures: torch.Tensor) -> None:
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (7,), generator=generator(4))
    g = generator(4)
    first = corrupt(pictures, "gaussian_noise", generator=g)
    assert torch.equal(first, corrupt(pictures, "gaussian_noise", keys=keys))
    assert not torch.equal(first, corrupt(pictures, "gaussian_noise", generator=g))  # it has moved on


def test_without_a_source_the_global_seed_decides(pictures: torch.Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = corrupt(pictures, "shot_noise"), corrupt(pictures, "shot_noise")
        torch.manual_seed(3)
        assert torch.equal(first, corrupt(pictures, "shot_noise"))
    assert not torch.equal(first, second)


def test_image_keys_depend_on_each_of_their_arguments() -> None:
    keys = image_keys(0, "fog", 5, range(1000))
    assert keys.dtype == torch.int64
    assert len(keys.unique()) == 1000
    assert torch.equal(keys[[7, 3]], image_keys(0, "fog", 5, torch.tensor([7, 3])))
    others = [image_keys(*which, range(1000)) for which in ((1, "fog", 5), (0, "snow", 5), (0, "fog", 4))]
    assert len(torch.cat((keys, *others)).unique()) == 4000
    assert image_keys(0, "fog", 5, []).shape == (0,)
    assert image_keys(0, "fog", 5, [0]).tolist() == [-3032648081262029114]  # fixed for good: streams are made from these


def test_quantize_truncates_to_levels(pictures: torch.Tensor) -> None:
    plain = corrupt(pictures, "gaussian_noise", keys=torch.arange(7))
    cut = corrupt(pictures, "gaussian_noise", keys=torch.arange(7), quantize=True)
    levels = cut.mul(255)
    assert torch.equal(levels, levels.round())
    assert torch.equal(levels, plain.mul(255).floor())
    exact = corrupt(pictures, "jpeg_compression")
    assert torch.equal(exact, corrupt(pictures, "jpeg_compression", quantize=True))  # whole levels stay


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype, pictures: torch.Tensor) -> None:
    x = pictures.to(dtype)
    out = corrupt(x, "contrast")
    assert out.dtype == dtype
    assert torch.equal(out, corrupt(x.float(), "contrast").to(dtype))


def test_layout_and_gradients_do_not_matter(pictures: torch.Tensor) -> None:
    expected = corrupt(pictures, "motion_blur", keys=torch.arange(7))
    x = pictures.to(memory_format=torch.channels_last).requires_grad_()
    out = corrupt(x, "motion_blur", keys=torch.arange(7))
    assert torch.equal(out, expected)
    assert not out.requires_grad
    assert torch.equal(corrupt(pictures.flip(3).flip(3), "motion_blur", keys=torch.arange(7)), expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("profile,height,width", [("cifar", 28, 28), ("cifar", 96, 64), ("imagenet", 64, 80)])
def test_other_sizes(name: str, profile: str, height: int, width: int) -> None:
    x = torch.rand(2, 3, height, width, generator=generator())
    for severity in (1, 5):
        out = corrupt(x, name, severity, profile, generator())
        assert out.shape == x.shape
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_black_and_white_pictures(name: str, value: float) -> None:
    for severity in (1, 3, 5):
        out = corrupt(torch.full((2, 3, 32, 32), value), name, severity, generator=generator())
        assert out.isfinite().all()


def test_an_empty_batch_stays_empty() -> None:
    assert corrupt(torch.empty(0, 3, 32, 32), "fog").shape == (0, 3, 32, 32)


def test_values_a_little_outside_are_clipped(pictures: torch.Tensor) -> None:
    x = pictures.clone()
    x[0, 0, 0, 0], x[1, 1, 1, 1] = 1.0005, -0.0005
    assert torch.equal(corrupt(x, "contrast"), corrupt(x.clamp(0, 1), "contrast"))


X = torch.full((2, 3, 32, 32), 0.5)


@pytest.mark.parametrize(
    "x,arguments,message",
    [
        (X, {"name": "rain"}, "unknown corruption 'rain'; choose from gaussian_noise, "),
        (X, {"severity": 0}, "severity must be a whole number from 1 to 5, got 0"),
        (X, {"severity": 6}, "got 6"),
        (X, {"severity": 2.5}, "got 2.5"),
        (X, {"severity": True}, "got True"),
        (X, {"profile": "mnist"}, "unknown profile 'mnist'; choose from cifar, imagenet"),
        (X, {"codec": "webp"}, "unknown codec 'webp'; choose from auto, pillow, torch"),
        (X[0], {}, "[N, 3, H, W], got (3, 32, 32)"),
        (X[:, :1], {}, "got (2, 1, 32, 32)"),
        (X.permute(0, 2, 3, 1), {}, "got (2, 32, 32, 3)"),
        (X.mul(255).byte(), {}, "got torch.uint8; divide 8-bit images by 255"),
        (X.numpy(), {}, "got ndarray"),
        (X * 4, {}, "got values from 2 to 2"),
        (X - 0.6, {}, "got values from -0.1 to -0.1"),
        (X * float("nan"), {}, "nan"),
        (X * float("inf"), {}, "inf"),
        (X[..., :7], {}, "needs images of at least 8 x 8 pixels, got 32 x 7"),
        (X[..., :9, :], {"name": "glass_blur", "profile": "imagenet"}, "at least 10 x 10 pixels, got 9 x 32"),
        (X[..., :11, :], {"name": "defocus_blur", "profile": "imagenet"}, "at least 12 x 12 pixels, got 11 x 32"),
        (X, {"keys": torch.arange(3)}, "one for each of the 2 images, got torch.int64 (3,)"),
        (X, {"keys": torch.arange(2).float()}, "got torch.float32 (2,)"),
    ],
)
def test_errors_say_what_was_given_and_change_nothing(x: torch.Tensor, arguments: dict, message: str) -> None:
    g = generator()
    state = g.get_state()
    source = {} if "keys" in arguments else {"generator": g}
    with pytest.raises(DataError, match=re.escape(message)):
        corrupt(x, **{"name": "fog", **source, **arguments})
    assert torch.equal(g.get_state(), state)
    assert torch.equal(X, torch.full((2, 3, 32, 32), 0.5))


def test_keys_and_generator_exclude_each_other() -> None:
    with pytest.raises(DataError, match="one of them only"):
        corrupt(X, "fog", generator=generator(), keys=torch.arange(2))


@pytest.mark.parametrize("index", [[0.5], torch.tensor(3), [[1]]])
def test_keys_of_bad_indices(index: object) -> None:
    with pytest.raises(DataError, match="whole numbers"):
        image_keys(0, "fog", 5, index)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_devices_agree(name: str, pictures: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys = image_keys(0, name, 5, range(7))
    for severity in (1, 3, 5):
        cpu = corrupt(pictures, name, severity, keys=keys)
        gpu = corrupt(pictures.cuda(), name, severity, keys=keys)
        assert gpu.is_cuda
        again = corrupt(pictures[2:4].cuda(), name, severity, keys=keys[2:4])
        assert torch.equal(gpu[2:4], again)
        # a value at a threshold (spatter, glass blur's truncation) may fall on the other side
        assert ((gpu.cpu() - cpu).abs() > 1e-4).float().mean() < 0.01
