"""The K views of a batch: the augmentation of the released code as batched torch code, for any image size and device.

In this order, on images in [0, 1]: clip; brightness, contrast, saturation, hue and gamma in random order; edge padding,
rotation, translation and scaling, bilinear; a 5-pixel Gaussian blur; centre crop; horizontal flip; noise; clip. Padding,
affine map, flip and crop are one resampling pass, since sampling with repeated edge pixels needs no padded image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.errors import ConfigError, InputError

Augment = Callable[[Tensor], Tensor]

KERNEL = 5  # pixels of the Gaussian blur
DRAWS = 16  # random numbers of a view besides its noise: 5 for the order, 5 colours, 4 affine, blur, flip


@dataclass(frozen=True)
class Views:
    """Draws one random view of a batch at every call.

    With per_sample=False one draw serves the whole batch, as in the released code; with per_sample=True every image has
    its own (the order of the colour changes stays one per view). Pairs are the ends of uniform ranges; `translate` is a
    share of the padded image, which is twice as large as the image, and moves whole pixels.

    >>> x = torch.rand(4, 3, 32, 32)
    >>> Views()(x, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 32, 32])
    """

    per_sample: bool = False
    brightness: tuple[float, float] = (0.6, 1.4)
    contrast: tuple[float, float] = (0.7, 1.3)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: tuple[float, float] = (-0.06, 0.06)
    gamma: tuple[float, float] = (0.7, 1.3)
    degrees: tuple[float, float] = (-15.0, 15.0)
    translate: float = 1 / 16
    scale: tuple[float, float] = (0.9, 1.1)
    sigma: tuple[float, float] = (0.001, 0.5)
    flip: float = 0.5
    noise: float = 0.005

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "hue", "gamma", "degrees", "scale", "sigma"):
            low, high = getattr(self, name)
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ConfigError(f"{name} of Views is a range (low, high), got ({low}, {high})")
        for name in ("brightness", "contrast", "saturation", "gamma"):
            if getattr(self, name)[0] < 0:
                raise ConfigError(f"{name} of Views starts at 0 or above, got {getattr(self, name)}")
        for name in ("scale", "sigma"):
            if getattr(self, name)[0] <= 0:
                raise ConfigError(f"{name} of Views starts above 0, got {getattr(self, name)}")
        if not (0 <= self.flip <= 1 and self.translate >= 0 and self.noise >= 0):
            raise ConfigError(
                f"Views takes flip in [0, 1], translate >= 0, noise >= 0; got {self.flip}, {self.translate}, {self.noise}"
            )

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One view of images [N, C, H, W] in [0, 1], C being 1 or 3."""
        full = in_full(x)
        return self.apply(full, *self.draw(full, generator)).to(x.dtype)

    def skip(self, x: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the random numbers of one view and make nothing of them."""
        self.draw(in_full(x), generator)

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """All the random numbers of one view: uniforms [1 or N, DRAWS] and standard normal noise like `x`."""
        if x.dim() != 4 or x.shape[1] not in (1, 3):
            raise InputError(
                f"Views takes images [N, 3, H, W] or [N, 1, H, W], got {list(x.shape)}: give the method an `augment` of "
                "your own for other inputs, or views=0"
            )
        rows = x.shape[0] if self.per_sample else 1
        uniform = torch.rand(rows, DRAWS, device=x.device, dtype=torch.float32, generator=generator)
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)
        return uniform.to(x.dtype), noise

    def apply(self, x: Tensor, uniform: Tensor, noise: Tensor, parts: "Parts | None" = None) -> Tensor:
        """The view that the given random numbers mean: the same every time. `parts` are other forms of its functions."""
        parts = parts or PARTS
        order: list[int] = uniform[0, :5].argsort().tolist()
        factors = self.factors(uniform)
        x = x.clamp(0, 1)
        for number in order:
            x = parts.colours[number](x, factors[:, number].view(-1, 1, 1, 1))
        x = resample(x, self.affine(uniform, x.shape[-2:]), KERNEL // 2)
        return parts.finish(x, self.blur_weights(uniform), noise, self.noise)

    def factors(self, uniform: Tensor) -> Tensor:
        """Brightness, contrast, saturation, hue and gamma of each row of draws: [rows, 5]."""
        ranges = (self.brightness, self.contrast, self.saturation, self.hue, self.gamma)
        low, high = uniform.new_tensor(ranges).unbind(1)
        return low + (high - low) * uniform[:, 5:10]

    def affine(self, uniform: Tensor, size: torch.Size) -> Tensor:
        """The map from output to input pixels, around the image's centre, flip included: [rows, 2, 3]."""
        height, width = size
        degrees, shift_x, shift_y, scale = uniform[:, 10:14].unbind(1)
        angle = torch.deg2rad(self.degrees[0] + (self.degrees[1] - self.degrees[0]) * degrees)
        scale = self.scale[0] + (self.scale[1] - self.scale[0]) * scale
        shift_x = torch.round((2 * shift_x - 1) * self.translate * 2 * width)
        shift_y = torch.round((2 * shift_y - 1) * self.translate * 2 * height)
        sign = 1 - 2 * (uniform[:, 15] < self.flip).to(uniform.dtype)  # a flip turns the output's x before all else
        cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
        rows = [
            torch.stack([cos * sign, sin, -(cos * shift_x + sin * shift_y)], 1),
            torch.stack([-sin * sign, cos, sin * shift_x - cos * shift_y], 1),
        ]
        return torch.stack(rows, 1)

    def blur_weights(self, uniform: Tensor) -> Tensor:
        """The taps of the Gaussian blur: [rows, KERNEL]."""
        sigma = self.sigma[0] + (self.sigma[1] - self.sigma[0]) * uniform[:, 14:15]
        offsets = torch.arange(KERNEL, device=uniform.device, dtype=uniform.dtype) - KERNEL // 2
        taps = (-0.5 * (offsets / sigma).square()).softmax(1)
        return taps * (taps > 1e-12)  # denormal numbers would make a CPU many times slower


@dataclass(frozen=True)
class Jitter:
    """Adds normal noise to inputs of any kind: a `share` of the spread that each of their numbers has in the batch.

    >>> x = torch.rand(4, 7)
    >>> Jitter()(x, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([4, 7])
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share >= 0):
            raise ConfigError(f"share of Jitter is a finite number >= 0, got {self.share}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs [N, ...] with noise of their own each."""
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)
        return x + self.share * x.std(0, correction=0, keepdim=True) * noise


def in_full(x: Tensor) -> Tensor:
    """Images in float32 where they are in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # half has too few bits for positions


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Move away from the mean grey of each image."""
    mean = gray(x).mean((1, 2, 3), keepdim=True)
    return (x * factor + mean * (1 - factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Move away from the grey of each pixel; grey images have none to change."""
    if x.shape[1] == 1:
        return x
    return (x * factor + gray(x) * (1 - factor)).clamp_(0, 1)


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a share of the circle; grey images have none."""
    if x.shape[1] == 1:
        return x
    h, s, v = rgb_to_hsv(x)
    return hsv_to_rgb(h + turn[:, 0], s, v)


def gamma(x: Tensor, exponent: Tensor) -> Tensor:
    """Raise to a power, by logarithm and exponential, which a CPU does several numbers at a time."""
    return x.clamp(1e-8, 1).log_().mul(exponent).exp_()


COLOUR_CHANGES = (brightness, contrast, saturation, hue, gamma)


def gray(x: Tensor) -> Tensor:
    """Luma of RGB images (ITU-R 601), one channel; grey images are their own."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


def rgb_to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue (a share of the circle), saturation and value of RGB images: three tensors [N, H, W]."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    spread = value - x.amin(1)
    divisor = torch.where(spread == 0, 1.0, spread)
    h = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    return fraction(h / 6), spread / torch.where(value == 0, 1.0, value), value


def hsv_to_rgb(h: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """RGB images of hue, saturation and value, by the form without branches: v - v s max(0, min(k, 4 - k, 1))."""
    chroma = v * s
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = 6 * fraction(h + n / 6)
        channels.append(v - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(channels, 1)


def fraction(x: Tensor) -> Tensor:
    """x mod 1; a compiler for CPUs does this several numbers at a time, and not the operator."""
    return x - x.floor()


def positions(affine: Tensor, size: torch.Size, margin: int) -> Tensor:
    """Where an output with a margin of extra pixels all around is sampled: [rows, 2, H', W'], in pixels from the centre."""
    height, width = size
    ys = torch.arange(-margin, height + margin, device=affine.device, dtype=affine.dtype) - (height - 1) / 2
    xs = torch.arange(-margin, width + margin, device=affine.device, dtype=affine.dtype) - (width - 1) / 2
    a = affine[:, :, :, None, None]  # [rows, 2, 3, 1, 1]
    return a[:, :, 0] * xs + a[:, :, 1] * ys[:, None] + a[:, :, 2]


def resample(x: Tensor, affine: Tensor, margin: int) -> Tensor:
    """Sample `x` bilinearly at affine positions, with a margin of extra pixels all around; edge pixels repeat."""
    count, _, height, width = x.shape
    at = positions(affine, x.shape[-2:], margin)
    grid = torch.stack([at[:, 0] * (2 / width), at[:, 1] * (2 / height)], -1)
    return F.grid_sample(x, grid.expand(count, -1, -1, -1), "bilinear", "border", align_corners=False)


def blur(x: Tensor, weights: Tensor) -> Tensor:
    """Separable blur with the taps of each row, without padding: the result is smaller by the kernel less one."""
    taps = weights.shape[1]
    height, width = x.shape[-2] - taps + 1, x.shape[-1] - taps + 1
    w = weights.view(-1, taps, 1, 1, 1).unbind(1)
    rows = x[..., :height, :] * w[0]
    for i in range(1, taps):
        rows = torch.addcmul(rows, x[..., i : i + height, :], w[i])
    out = rows[..., :width] * w[0]
    for i in range(1, taps):
        out = torch.addcmul(out, rows[..., i : i + width], w[i])
    return out


def finish(x: Tensor, weights: Tensor, noise: Tensor, strength: float) -> Tensor:
    """Blur, add noise and clip."""
    return blur(x, weights).add(noise, alpha=strength).clamp_(0, 1)


@dataclass(frozen=True)
class Parts:
    """The functions a view is put together from, so that an engine can use compiled ones."""

    colours: tuple[Callable[[Tensor, Tensor], Tensor], ...] = COLOUR_CHANGES
    finish: Callable[[Tensor, Tensor, Tensor, float], Tensor] = finish


PARTS = Parts()
