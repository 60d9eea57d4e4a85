"""The views of a batch: on a GPU several at a time and without the host, on a CPU one per core."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.augment import KERNEL, Parts, Views, brightness, contrast, finish, gamma, hue, positions, saturation
from petal.engine.passes import kernels_for
from petal.engine.policy import Policy
from petal.methods.network import ViewSource

LIMIT = 1 << 26  # elements of one group of views: 256 MiB


def made_together(source: ViewSource, wanted: Sequence[int]) -> Iterator[Tensor]:
    """The views with these numbers, in order, many by one kernel; the random numbers are those of views made one by one."""
    assert source.views is not None
    x = source.images.contiguous()
    size = max(1, LIMIT // x.numel())
    for start in range(0, source.count, size):
        numbers = range(start, min(start + size, source.count))
        drawn = [drawn for number, drawn in [(number, source.draw()) for number in numbers] if number in wanted]
        if drawn:
            uniform, noise = (torch.stack(parts) for parts in zip(*drawn, strict=True))
            yield from make_views(source.views, x, uniform, noise)


class Maker:
    """Makes the views of batches of one shape on a CPU, by compiled functions where these gain.

    Where one draw serves the whole batch, a pixel's values in all images lie side by side in memory, [C, H, W, N]: every
    image is sampled at the same places, so that resampling and blur are sums of whole rows, which a CPU does several
    numbers at a time, and not of single pixels picked one by one.
    """

    def __init__(self, views: Views, policy: Policy, compiled: bool) -> None:
        self.views = views
        self.parts: Parts | None = None
        self.side_by_side = compiled and not views.per_sample
        if not compiled:
            return

        def gain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return policy.compiler(function, one_thread=policy.view_threads > 1)  # type: ignore[no-any-return]

        strength = views.noise  # a constant for the compiler: as an argument it would keep the loop from being vectorised
        # brightness, gamma and resampling are single calls already
        dims = (2,) if self.side_by_side else (1, 2, 3)
        contrasted = gain(lambda x, factor: contrast(x, factor, dims))
        colours = (brightness, contrasted, gain(saturation), gain(hue), gamma)
        if self.side_by_side:
            # a function each: the compiler counts recompilations by function
            down, across = gain(lambda x, weights: _blurred(x, weights, 1)), gain(lambda x, weights: _blurred(x, weights, 2))
            end = gain(lambda x, noise: (x.permute(3, 0, 1, 2) + strength * noise).clamp(0, 1).contiguous())
            self.parts = Parts(colours, lambda x, weights, noise, _: end(across(down(x, weights), weights), noise))
        else:
            end = gain(lambda x, weights, noise: finish(x, weights, noise, strength))
            self.parts = Parts(colours, lambda x, weights, noise, _: end(x, weights, noise))

    def of(self, x: Tensor) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
        """What makes views of a batch [N, C, H, W] of their random numbers."""
        if not self.side_by_side:
            return lambda drawn: self.views.apply(x, *drawn, self.parts)
        x = x.clamp(0, 1).permute(1, 2, 3, 0).contiguous()
        return lambda drawn: self._made(x, *drawn)

    def _made(self, x: Tensor, uniform: Tensor, noise: Tensor) -> Tensor:
        views, parts, (channels, height, width, count) = self.views, self.parts, x.shape
        assert parts is not None
        x = x.view(1, channels, height * width, count)
        factors = views.factors(uniform)
        for number in uniform[0, :5].argsort().tolist():
            x = parts.colours[number](x, factors[:, number].view(1, 1, 1, 1))
        size = torch.Size((height, width))
        places, shares = bilinear_taps(positions(views.affine(uniform, size), size, KERNEL // 2)[0], size)
        planes = torch.arange(channels)[:, None, None] * (height * width)
        x = F.embedding_bag(
            (places + planes).flatten(0, 1), x.view(-1, count), mode="sum", per_sample_weights=shares.repeat(channels, 1)
        )
        x = x.view(channels, height + KERNEL - 1, width + KERNEL - 1, count)
        return parts.finish(x, views.blur_weights(uniform)[0], noise, views.noise)


def bilinear_taps(at: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """The four pixels and their shares that make the value at each of the positions [2, H', W']: [places, 4] both."""
    height, width = size
    x = (at[0] + (width - 1) / 2).clamp(0, width - 1).flatten()
    y = (at[1] + (height - 1) / 2).clamp(0, height - 1).flatten()
    left, top = x.floor(), y.floor()
    right, low = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    places = torch.stack([top * width + left, top * width + right, low * width + left, low * width + right], 1)
    x, y = x - left, y - top
    return places.long(), torch.stack([(1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y], 1)


def _blurred(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Sum of neighbours along one dimension, which becomes shorter by the kernel less one."""
    size = x.shape[dim] - KERNEL + 1
    out = x.narrow(dim, 0, size) * weights[0]
    for tap in range(1, KERNEL):
        out = torch.addcmul(out, x.narrow(dim, tap, size), weights[tap])
    return out


def make_views(views: Views, x: Tensor, uniform: Tensor, noise: Tensor) -> Iterable[Tensor]:
    """The views [N, C, H, W] that the random numbers mean, one after the other."""
    kernels = kernels_for(x)
    if kernels is None or x.shape[1] != 3 or x.dtype != torch.float32:
        return (views.apply(x, u, n) for u, n in zip(uniform, noise, strict=True))
    count, rows = uniform.shape[:2]
    flat = uniform.flatten(0, 1)
    factors, affine = views.factors(flat).view(count, rows, 5), views.affine(flat, x.shape[-2:]).view(count, rows, 6)
    taps = views.blur_weights(flat).view(count, rows, -1)
    made: Tensor = kernels.make_views(x, uniform[:, 0, :5].argsort(1), factors, affine, taps, noise, views.noise)
    return made
