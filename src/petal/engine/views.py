"""The views of a batch, several at a time and on the device alone: the random numbers are those the plain path draws."""

import torch
from torch import Tensor

from petal.augment import Views
from petal.engine.passes import kernels_for

LIMIT = 1 << 26  # elements of one group of views: 256 MiB


def draw(views: Views, x: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Uniforms [K, rows, DRAWS] and noise [K, *x.shape] of `count` views, in the order the plain path draws them."""
    draws = [views.draw(x, generator) for _ in range(count)]
    return torch.stack([u for u, _ in draws]), torch.stack([n for _, n in draws])


def group_size(x: Tensor) -> int:
    """How many views to make at a time."""
    return max(1, LIMIT // x.numel())


def make_views(views: Views, x: Tensor, uniform: Tensor, noise: Tensor) -> Tensor:
    """The views [K, N, C, H, W] that the random numbers mean."""
    kernels = kernels_for(x)
    if kernels is None or x.shape[1] != 3 or x.dtype != torch.float32:
        return torch.stack([views.apply(x, u, n) for u, n in zip(uniform, noise, strict=True)])
    count, rows = uniform.shape[:2]
    flat = uniform.flatten(0, 1)
    return kernels.make_views(  # type: ignore[no-any-return]
        x,
        uniform[:, 0, :5].argsort(1),
        views.factors(flat).view(count, rows, 5),
        views.affine(flat, x.shape[-2:]).view(count, rows, 6),
        views.blur_weights(flat).view(count, rows, -1),
        noise,
        views.noise,
    )
