"""The K views of a batch: the augmentation of the released code as batched torch code, for any image size and device.

`Views`, in this order, on images in [0, 1]: clip; brightness, contrast, saturation, hue and gamma in random order; edge
padding, rotation, translation and scaling, bilinear; a 5-pixel Gaussian blur; centre crop; horizontal flip; noise; clip.
Padding, affine map, flip and crop are one resampling pass, since sampling with repeated edge pixels needs no padded image.

`Jitter` is for inputs of any kind, `AugMix` for methods that ask for views that are far from each other.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.calls import shapes
from petal.errors import ConfigError, InputError, PetalWarning

Augment = Callable[[Tensor], Tensor]

KERNEL = 5  # pixels of the Gaussian blur
SLACK = 0.1  # resampling overshoots [0, 1] a little
DRAWS = 16  # random numbers of a view besides its noise: 5 for the order, 5 colours, 4 affine, blur, flip


@dataclass(frozen=True)
class Views:
    """Draws one random view of a batch at every call.

    With per_sample=False one draw serves the whole batch, as in the released code; with per_sample=True every image has
    its own (the order of the colour changes stays one per view). Pairs are the ends of uniform ranges; `translate` is a
    share of the padded image, which is twice as large as the image, and moves whole pixels. For a network that takes
    normalised images, `mean` and `std` are those they were normalised by, one number or one per channel: views are then made
    of the pixels, and normalised again.

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
    mean: Sequence[float] | float | None = None
    std: Sequence[float] | float | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ConfigError("Views takes both mean and std, or neither")
        if self.mean is not None and self.std is not None:
            given = [torch.as_tensor(numbers, dtype=torch.float64) for numbers in (self.mean, self.std)]
            mean, std = (tuple(numbers.flatten().tolist()) for numbers in given)
            if not ({len(mean), len(std)} <= {1, 3} and all(map(math.isfinite, (*mean, *std))) and min(std) > 0):
                raise ConfigError(f"mean and std of Views are 1 or 3 finite numbers, std above 0; got {mean} and {std}")
            object.__setattr__(self, "mean", mean)      # as tuples the views stay a value with a hash
            object.__setattr__(self, "std", std)
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
        """One view of images [N, C, H, W] in [0, 1] (or normalised, see `mean`), C being 1 or 3."""
        pixels = self.pixels(x)
        return self.as_given(self.apply(pixels, *self.draw(pixels, generator)), x)

    def pixels(self, x: Tensor) -> Tensor:
        """The images that views are made of: in [0, 1], in float32 where they are in half precision."""
        x = in_full(x)
        if self.mean is None or self.std is None:
            return x
        self.check(x)
        return x * x.new_tensor(self.std).view(-1, 1, 1) + x.new_tensor(self.mean).view(-1, 1, 1)

    def as_given(self, view: Tensor, x: Tensor) -> Tensor:
        """A view in the range and precision of the batch that it is of."""
        if self.mean is not None and self.std is not None:
            view = (view - view.new_tensor(self.mean).view(-1, 1, 1)) / view.new_tensor(self.std).view(-1, 1, 1)
        return view.to(x.dtype)

    def look(self, x: Tensor) -> None:
        """Warn if these images are no pixels; the host waits for the device."""
        self.check(x)
        low, high = (float(value) for value in self.pixels(x).aminmax())
        if low < -SLACK or high > 1 + SLACK:
            also = "" if self.mean is None else f" after mean={self.mean} and std={self.std} are undone"
            warnings.warn(
                f"views are made of pixels in [0, 1], and the images lie between {low:.3g} and {high:.3g}{also}. For a "
                "network that takes normalised images, give augment=Views(mean=..., std=...), or petal.adapt(..., "
                "normalised=(mean, std)); for one that takes other numbers, an `augment` of your own",
                PetalWarning, stacklevel=2,
            )  # fmt: skip

    def skip(self, x: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw the random numbers of one view and make nothing of them."""
        self.draw(in_full(x), generator)

    def check(self, x: Tensor) -> None:
        """An InputError unless these are images."""
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] not in (1, 3) or not x.is_floating_point():
            raise InputError(
                f"Views takes images [N, 3, H, W] or [N, 1, H, W], got {shapes(x)}: give the method an `augment` of "
                "your own for other inputs, or views=0"
            )

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """All the random numbers of one view: uniforms [1 or N, DRAWS] and standard normal noise like `x`."""
        self.check(x)
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
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError(f"Jitter adds noise to one tensor of floats, got {what}: give an `augment` of your own")
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)
        return x + self.share * x.std(0, correction=0, keepdim=True) * noise


OPERATIONS = 9      # of AugMix: 4 that change values, 5 that move pixels
MOVES = 6           # random numbers of an image before its chains: area, ratio, x, y, flip, and the share of the chains


@dataclass(frozen=True)
class AugMix:
    """Mixes chains of operations, drawn for each image (Hendrycks et al., 2020): the views of MEMO.

    An image is moved by up to `padding` pixels, or with `crop` a part of it, of a share of its area in this range, is drawn
    as large as the image. It is flipped with probability `flip`. Then `width` chains of 1 to `depth` operations each are
    averaged with random weights, and the average with the image. The operations are autocontrast, equalize, posterize,
    solarize, rotation, and shear and translation in x and y, on 8-bit values and as strong as in public code, where
    `severity` goes to 10 (MEMO: 1). Pixels from outside have the value `fill`.

    >>> x = torch.rand(4, 3, 32, 32)
    >>> AugMix()(x, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 32, 32])
    """

    severity: float = 1.0
    width: int = 3
    depth: int = 3
    padding: int = 4
    crop: tuple[float, float] | None = None
    flip: float = 0.5
    fill: float = 0.0

    def __post_init__(self) -> None:
        whole = all(isinstance(value, int) for value in (self.width, self.depth, self.padding))
        if not (whole and self.width >= 1 and self.depth >= 1 and self.padding >= 0):
            raise ConfigError(
                "AugMix takes whole numbers, width and depth from 1 and padding from 0; got "
                f"{self.width}, {self.depth}, {self.padding}"
            )
        if not (0.1 <= self.severity <= 10 and 0 <= self.flip <= 1 and 0 <= self.fill <= 1):
            raise ConfigError(
                f"AugMix takes severity in [0.1, 10], flip and fill in [0, 1]; got {self.severity}, {self.flip}, {self.fill}"
            )
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ConfigError(f"crop of AugMix is a range (low, high) of shares of the area, got {self.crop}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A view of each of the images [N, C, H, W] in [0, 1], C being 1 or 3."""
        if x.dim() != 4 or x.shape[1] not in (1, 3):
            shape = list(x.shape)
            raise InputError(f"AugMix takes images [N, 3, H, W] or [N, 1, H, W], got {shape}: give an `augment` of your own")
        count, each = len(x), 2 + 3 * self.depth
        draws = torch.rand(count, MOVES + self.width * each, device=x.device, dtype=torch.float32, generator=generator)
        full = in_full(x)
        draws = draws.to(full.dtype)
        begun = self.moved(full.clamp(0, 1), draws)
        chains = draws[:, MOVES:].reshape(count * self.width, each)     # weight, length, and what each operation needs
        out, length = begun.repeat_interleave(self.width, 0), 1 + (self.depth * chains[:, 1]).floor()
        for number in range(self.depth):
            changed = self.changed(out, *chains[:, 2 + 3 * number : 5 + 3 * number].unbind(1))
            out = torch.where((number < length).view(-1, 1, 1, 1), changed, out)
        weights = -chains[:, 0].clamp(1e-7, 1 - 1e-7).log().view(count, self.width, 1, 1, 1)    # Dirichlet, once normed
        mixed = (out.view(count, self.width, *x.shape[1:]) * weights).sum(1) / weights.sum(1)
        return torch.lerp(mixed, begun, draws[:, 5].view(-1, 1, 1, 1)).clamp(0, 1).to(x.dtype)

    def moved(self, x: Tensor, draws: Tensor) -> Tensor:
        """The images that the chains begin with: moved or cropped, and flipped."""
        area, ratio, right, down, flip, _ = draws[:, :MOVES].unbind(1)
        size = x.new_tensor([x.shape[3], x.shape[2]])
        place = torch.stack([right, down], 1)                           # [N, 2], as all that follows: x and y
        if self.crop is None:
            part = torch.ones_like(place)
            shift = ((2 * self.padding + 1) * place).floor().clamp(max=2 * self.padding) - self.padding
        else:
            area, ratio = self.crop[0] + (self.crop[1] - self.crop[0]) * area, (4 / 3) ** (2 * ratio - 1)
            part = torch.stack([area * ratio, area / ratio], 1).sqrt().clamp(max=1)
            shift = (place - 0.5) * (1 - part) * size
        sign = torch.stack([1 - 2 * (flip < self.flip).to(x.dtype), torch.ones_like(flip)], 1)
        affine = torch.cat([torch.diag_embed(part * sign), shift[:, :, None]], 2)
        return self.resampled(x, affine)

    def changed(self, x: Tensor, which: Tensor, level: Tensor, sign: Tensor) -> Tensor:
        """Images after the operation that is drawn for each: its number, how strong it is, and which way it goes."""
        which = (OPERATIONS * which).floor()
        level = 0.1 + (self.severity - 0.1) * level
        values = (255 * x).round().long().flatten(2)
        table = self.table(values, which, level)
        seen = table.gather(2, values).div(255).view(x.shape)
        moved = self.resampled(x, self.affine(which - 4, level * torch.where(sign < 0.5, -1, 1), x.shape[-2:]))
        return torch.where((which < 4).view(-1, 1, 1, 1), seen, moved)

    def table(self, values: Tensor, which: Tensor, level: Tensor) -> Tensor:
        """What autocontrast (0), equalize (1), posterize (2) or solarize (3) makes of the values 0 to 255: [N, C, 256]."""
        i = torch.arange(256, device=level.device, dtype=level.dtype)
        which, level = which[:, None, None], level[:, None, None]
        low, high = (bound[..., None].to(level.dtype) for bound in (values.amin(2), values.amax(2)))
        contrasted = torch.where(high > low, ((i - low) * 255 / (high - low).clamp(min=1)).floor().clamp(0, 255), i)
        counts = torch.zeros(*values.shape[:2], 256, device=level.device, dtype=level.dtype)
        counts.scatter_add_(2, values, torch.ones_like(values, dtype=level.dtype))
        step = ((values.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) / 255).floor()
        below = counts.cumsum(2) - counts
        equal = torch.where(step > 0, ((below + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(max=255), i)
        coarse = 2.0 ** (4 + (0.4 * level).floor())
        posterized = (i / coarse).floor() * coarse
        solarized = torch.where(i < 256 - (25.6 * level).floor(), i, 255 - i)
        first = torch.where(which == 0, contrasted, equal)
        return torch.where(which < 2, first, torch.where(which == 2, posterized, solarized))

    def affine(self, which: Tensor, level: Tensor, size: torch.Size) -> Tensor:
        """The map of rotation (0), shear in x (1) and y (2), translation in x (3) and y (4) from output to input pixels."""
        height, width = size
        angle = torch.deg2rad(torch.where(which == 0, (3 * level).trunc(), 0))
        shear_x, shear_y = (torch.where(which == number, 0.03 * level, 0) for number in (1, 2))
        right = torch.where(which == 3, (level * width / 30).trunc(), shear_x * height / 2)    # shear keeps the upper left
        down = torch.where(which == 4, (level * height / 30).trunc(), shear_y * width / 2)
        rows = [[angle.cos(), shear_x - angle.sin(), right], [shear_y + angle.sin(), angle.cos(), down]]
        return torch.stack([torch.stack(row, 1) for row in rows], 1)

    def resampled(self, x: Tensor, affine: Tensor) -> Tensor:
        """The images at affine positions; pixels from outside have the value `fill`."""
        return resample(x - self.fill, affine, 0, outside="zeros") + self.fill


def in_full(x: Tensor) -> Tensor:
    """Images, or other values, in float32 where they are in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # half has too few bits for positions


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor, pixels: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    """Move away from the mean grey of each image, which is that over these dimensions."""
    mean = gray(x).mean(pixels, keepdim=True)
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


def resample(x: Tensor, affine: Tensor, margin: int, outside: str = "border") -> Tensor:
    """Sample `x` bilinearly at affine positions, with a margin of extra pixels all around; edges repeat, or are "zeros"."""
    count, _, height, width = x.shape
    at = positions(affine, x.shape[-2:], margin)
    grid = torch.stack([at[:, 0] * (2 / width), at[:, 1] * (2 / height)], -1)
    return F.grid_sample(x, grid.expand(count, -1, -1, -1), "bilinear", outside, align_corners=False)


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
