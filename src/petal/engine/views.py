"""The views of a batch, on a GPU several at a time and without the host."""

from collections.abc import Iterable

import torch
from torch import Tensor

from petal.augment import COLOUR_CHANGES, Parts, Views, contrast, finish, hue, saturation
from petal.engine.passes import kernels_for
from petal.engine.policy import Policy

LIMIT = 1 << 26  # elements of one group of views: 256 MiB


def draw(views: Views, x: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Uniforms [K, rows, DRAWS] and noise [K, *x.shape] of `count` views.

    One view at a time has the very numbers of the plain path; several at once are drawn in few calls, and are other
    numbers of the same generator.
    """
    first = views.draw(x, generator)
    if count == 1:
        return first[0][None], first[1][None]
    uniform = torch.rand(count - 1, *first[0].shape, device=x.device, generator=generator)
    noise = torch.randn(count - 1, *x.shape, device=x.device, dtype=x.dtype, generator=generator)
    return torch.cat([first[0][None], uniform.to(x.dtype)]), torch.cat([first[1][None], noise])


def group_size(x: Tensor) -> int:
    """How many views to make at a time: on a CPU one, since there is no launch to save."""
    return max(1, LIMIT // x.numel()) if x.is_cuda else 1


def compiled_parts(views: Views, policy: Policy) -> Parts:
    """The parts of a view that gain by compilation; brightness, gamma and resampling are single calls already."""
    gain = (contrast, saturation, hue)
    colours = tuple(policy.compiler(change) if change in gain else change for change in COLOUR_CHANGES)
    strength = views.noise  # a constant for the compiler: as an argument it would keep the loop from being vectorised
    compiled = policy.compiler(lambda x, weights, noise: finish(x, weights, noise, strength))
    return Parts(colours, lambda x, weights, noise, _: compiled(x, weights, noise))


def make_views(views: Views, x: Tensor, uniform: Tensor, noise: Tensor, parts: Parts | None = None) -> Iterable[Tensor]:
    """The views [N, C, H, W] that the random numbers mean, one after the other."""
    kernels = kernels_for(x)
    if kernels is None or x.shape[1] != 3 or x.dtype != torch.float32:
        return (views.apply(x, u, n, parts) for u, n in zip(uniform, noise, strict=True))
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
