"""The 19 common corruptions at five severities, for whole batches, on any device.

    corrupt(x, "fog", severity=5, profile="cifar")

Fifteen corruptions make up the benchmark (`CORRUPTIONS`, in its order), four more are for validation
(`VALIDATION_CORRUPTIONS`). Constants are the published ones, in `constants.py`, for two profiles: "cifar" (32 pixels) and
"imagenet" (224). Each procedure is a function `name(x, c, rng)` of float32 images [N, 3, H, W] in [0, 1], the constants
of one severity and the images' random numbers; it returns the changed images, which `corrupt` clips.

All randomness of an image comes from its 64-bit key (see `random.py`): the same key gives the same image, whatever else
is in the batch. Images are processed in chunks, so that memory stays bounded however large the batch.

To add a corruption: write such a function, put it into `REGISTRY`, its five settings for every profile into `CONSTANTS`,
its name into `VALIDATION_CORRUPTIONS`, and the least image side, where it has one, into `_least_side`. It must draw from
`rng` only and treat every image by itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petal.corruptions import blur, digital, jpeg, noise, weather
from petal.corruptions.constants import CONSTANTS, Profile
from petal.corruptions.jpeg import Codec
from petal.corruptions.random import KeyedRandom, fold_text, mix, mix_int
from petal.errors import DataError

__all__ = ["CORRUPTIONS", "REGISTRY", "VALIDATION_CORRUPTIONS", "Codec", "Profile", "corrupt", "image_keys"]

Procedure = Callable[[Tensor, Any, KeyedRandom], Tensor]

REGISTRY: dict[str, Procedure] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}
CORRUPTIONS: tuple[str, ...] = tuple(REGISTRY)[:15]
VALIDATION_CORRUPTIONS: tuple[str, ...] = tuple(REGISTRY)[15:]

_SEVERITIES = (1, 2, 3, 4, 5)
_CODECS = ("auto", "pillow", "torch")
_LEAST_SIDE = 8
_TOLERANCE = 1e-3  # values this far outside [0, 1] are clipped in silence
_CHUNK_PIXELS = {"cpu": 1 << 19}  # large enough for few calls, small enough for the cache
_CHUNK_PIXELS_ELSEWHERE = 1 << 22  # one that keeps a GPU busy and fits beside a network


@torch.no_grad()
def corrupt(
    x: Tensor,
    name: str,
    severity: int = 5,
    profile: Profile = "cifar",
    generator: torch.Generator | None = None,
    quantize: bool = False,
    *,
    keys: Tensor | None = None,
    codec: Codec = "auto",
) -> Tensor:
    """Corrupted images; x is not changed.

    Args:
        x: images, floating point, [N, 3, H, W] in [0, 1], on any device.
        name: one of `CORRUPTIONS` or `VALIDATION_CORRUPTIONS`.
        severity: 1 (weak) to 5 (strong).
        profile: whose constants: "cifar" (for small images) or "imagenet".
        generator: where one key an image is drawn from. Without generator and keys, they come from torch's global
            generator, so `torch.manual_seed` fixes them.
        quantize: truncate to the 256 levels of 8 bits, as the published files are: floor(x * 255) / 255.
        keys: int64 [N], the images' own keys, in place of a generator (see `image_keys`).
        codec: of jpeg_compression: "torch" (the batch at once), "pillow" (image by image) or "auto". They agree to the
            last bit, and "auto" is "torch".

    Returns:
        Images of x's shape, dtype and device, in [0, 1]. The arithmetic is float32 whatever the dtype.

    Raises:
        DataError: for an argument that makes no sense; nothing has been drawn from the generator then.

    >>> import torch
    >>> x = torch.full((2, 3, 32, 32), 0.5)
    >>> corrupt(x, "contrast").shape
    torch.Size([2, 3, 32, 32])
    >>> keys = image_keys(seed=0, name="gaussian_noise", severity=5, index=range(2))
    >>> noisy = corrupt(x, "gaussian_noise", keys=keys)
    >>> torch.equal(noisy[1:], corrupt(x[1:], "gaussian_noise", keys=keys[1:]))
    True
    """
    _check_choice("corruption", name, tuple(REGISTRY))
    _check_choice("profile", profile, tuple(CONSTANTS))
    _check_severity(severity)
    _check_choice("codec", codec, _CODECS)
    _check_images(x)
    constants = CONSTANTS[profile][name][severity - 1]
    least = _least_side(name, constants)
    if min(x.shape[-2:]) < least:
        raise DataError(
            f"{name} at severity {severity} of the {profile} profile needs images of at least {least} x {least} pixels, "
            f"got {x.shape[-2]} x {x.shape[-1]}; enlarge them or take the other profile"
        )
    keys = _keys(len(x), x.device, keys, generator)

    procedure = REGISTRY[name]
    if name == "jpeg_compression":
        procedure = partial(jpeg.jpeg_compression, codec=codec)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pixels = _CHUNK_PIXELS.get(x.device.type, _CHUNK_PIXELS_ELSEWHERE)
    size = max(1, pixels // (x.shape[-2] * x.shape[-1]))
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        images = x[part].float().clamp(0.0, 1.0)
        images = procedure(images.contiguous(), constants, KeyedRandom(keys[part])).clamp(0.0, 1.0)
        out[part] = images.mul_(255.0).floor_().div_(255.0) if quantize else images
    return out


def image_keys(seed: int, name: str, severity: int, index: Sequence[int] | Tensor) -> Tensor:
    """One key per image, int64 [N], that depends only on the seed, the corruption, the severity and the image's index.

    >>> image_keys(0, "fog", 5, [3, 4]).tolist() == [int(image_keys(0, "fog", 5, [i])[0]) for i in (3, 4)]
    True
    """
    _check_choice("corruption", name, tuple(REGISTRY))
    _check_severity(severity)
    index = torch.as_tensor(index)
    if index.dim() != 1 or (len(index) and (index.is_floating_point() or index.is_complex())):
        raise DataError(f"index must be whole numbers, one per image, got {index.dtype} of shape {tuple(index.shape)}")
    base = mix_int(mix_int(mix_int(seed) + fold_text(name)) + severity)
    return mix(mix(index.long()) ^ (base - (1 << 64) if base >> 63 else base))


def _keys(n: int, device: torch.device, keys: Tensor | None, generator: torch.Generator | None) -> Tensor:
    if keys is not None and generator is not None:
        raise DataError("both keys and a generator were given; the images' random numbers come from one of them only")
    if keys is None:
        source = torch.device("cpu") if generator is None else generator.device
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator, device=source)
    elif keys.dtype != torch.int64 or keys.shape != (n,):
        raise DataError(f"keys must be int64, one for each of the {n} images, got {keys.dtype} {tuple(keys.shape)}")
    return keys.to(device)


def _least_side(name: str, constants: Any) -> int:
    """The smallest image the procedure makes sense for."""
    if name == "defocus_blur":
        return max(_LEAST_SIDE, 2 + max(abs(dy) for dy, _, _ in blur.disk_kernel(*constants)))
    if name == "glass_blur":
        return max(_LEAST_SIDE, 2 * int(constants[1]) + 2)
    return _LEAST_SIDE


def _check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DataError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")


def _check_severity(severity: object) -> None:
    if isinstance(severity, bool) or severity not in _SEVERITIES:
        raise DataError(f"severity must be a whole number from 1 to 5, got {severity!r}")


def _check_images(x: object) -> None:
    if not isinstance(x, Tensor):
        raise DataError(f"images must be a torch tensor [N, 3, H, W], got {type(x).__name__}")
    if x.dim() != 4 or x.shape[1] != 3:
        raise DataError(f"images must have the shape [N, 3, H, W], got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise DataError(f"images must be floating point in [0, 1], got {x.dtype}; divide 8-bit images by 255")
    if x.numel() == 0:
        return
    low, high = torch.stack(x.detach().aminmax()).tolist()
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # NaN fails, too
        raise DataError(f"images must lie in [0, 1], got values from {low:.4g} to {high:.4g}; scale or clip them first")
