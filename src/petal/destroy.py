"""What takes the shape of objects out of images and leaves the rest (DeYO, Section 3.2), as values that are called."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.errors import ConfigError, InputError


@dataclass(frozen=True)
class Patches:
    """`count` by `count` patches in random order, another one for each image.

    Sides that are no multiple of `count` are resized to one and back, bilinear with antialiasing. (The released code makes
    images square.)

    >>> x = torch.rand(2, 3, 8, 8)
    >>> Patches(4)(x).shape, torch.equal(Patches(4)(x).sum((2, 3)).round(decimals=3), x.sum((2, 3)).round(decimals=3))
    (torch.Size([2, 3, 8, 8]), True)
    """

    count: int = 4

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"the count of Patches is 1 or more, got {self.count}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images [N, C, H, W] with their patches shuffled."""
        n, channels, height, width = _image_shape(x)
        k = self.count
        if min(height, width) < k:
            raise InputError(f"Patches({k}) needs images of {k} by {k} pixels or more, got {list(x.shape)}")
        h, w = height // k, width // k
        tiles = _resized(x, (h * k, w * k)).reshape(n, channels, k, h, k, w).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        order = torch.rand(n, k * k, device=x.device, generator=generator).argsort(-1)
        tiles = tiles[torch.arange(n, device=x.device)[:, None], order].reshape(n, k, k, channels, h, w)
        return _resized(tiles.permute(0, 3, 1, 4, 2, 5).reshape(n, channels, h * k, w * k), (height, width))


@dataclass(frozen=True)
class Pixels:
    """All pixels in random order, the same for all images of a batch."""

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images [N, C, H, W] with their pixels shuffled."""
        _, _, height, width = _image_shape(x)
        order = torch.randperm(height * width, device=x.device, generator=generator)
        return x.flatten(2)[:, :, order].reshape(x.shape)


@dataclass(frozen=True)
class Occlusion:
    """A square of the image's mean colour; the defaults are those for images of 224 by 224 pixels."""

    size: int = 112
    row: int = 56
    column: int = 56

    def __post_init__(self) -> None:
        if self.size < 1 or self.row < 0 or self.column < 0:
            raise ConfigError(f"Occlusion takes a size from 1, row and column from 0; got {self}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images [N, C, H, W] with the square covered."""
        _, _, height, width = _image_shape(x)
        if self.row + self.size > height or self.column + self.size > width:
            raise InputError(f"{self} does not fit images of {height} by {width} pixels: give size, row and column")
        x = x.clone()
        square = x[:, :, self.row : self.row + self.size, self.column : self.column + self.size]
        square.copy_(x.mean((2, 3), keepdim=True).expand_as(square))
        return x


def _image_shape(x: Tensor) -> tuple[int, int, int, int]:
    if not isinstance(x, Tensor) or x.dim() != 4:
        what = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(f"images are [N, C, H, W], got {what}: for other inputs give DeYO a `destroy` of your own")
    n, channels, height, width = x.shape
    return n, channels, height, width


def _resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    if x.shape[2:] == size:
        return x
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=True)
