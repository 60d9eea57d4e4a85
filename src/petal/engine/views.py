"""The views of a batch: on a GPU several at a time and without the host, on a CPU one a core."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

from petal.augment import COLOUR_CHANGES, Parts, Views, contrast, finish, hue, saturation
from petal.engine.passes import kernels_for
from petal.engine.policy import Policy

Drawn = TypeVar("Drawn")

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
    one = policy.view_threads > 1
    gain = (contrast, saturation, hue)
    colours = tuple(policy.compiler(c, one_thread=one) if c in gain else c for c in COLOUR_CHANGES)
    strength = views.noise  # a constant for the compiler: as an argument it would keep the loop from being vectorised
    compiled = policy.compiler(lambda x, weights, noise: finish(x, weights, noise, strength), one_thread=one)
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


class Crew:
    """Threads that take whole views, each on a core of its own.

    An operation shared out over the cores makes them wait for each other many times in a view, and leaves all but one idle
    in what cannot be shared out, such as drawing noise. Whole views have none of that.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        threads, started = torch.get_num_threads(), Barrier(size + 1)

        def begin() -> None:
            torch.set_num_threads(1)  # of this thread, and of those to come: the latter is undone below
            started.wait()

        self.pool = ThreadPoolExecutor(size, "petal-views", begin)
        for _ in range(size):
            self.pool.submit(lambda: None)
        started.wait()
        torch.set_num_threads(threads)

    def work(
        self, draw: Callable[[], Drawn], make: Callable[[Drawn], Tensor], count: int, alone: bool = False
    ) -> list[Tensor]:
        """`make` of `count` draws. The draws are made one after the other, and the results come in their order.

        With `alone`, one thread does it all: while one compiles, no other may call what is compiled.
        """
        results: dict[int, Tensor] = {}
        numbers, turn = iter(range(count)), Lock()

        def member() -> None:
            while True:
                with turn:
                    number = next(numbers, None)
                    if number is None:
                        return
                    drawn = draw()
                with torch.no_grad():
                    results[number] = make(drawn)

        members = [self.pool.submit(member) for _ in range(1 if alone else self.size)]
        wait(members)
        for done in members:
            done.result()
        return [results[number] for number in range(count)]


def crew(size: int) -> Crew:
    """The one crew of that size in this process."""
    return _crew(size, os.getpid())


@lru_cache
def _crew(size: int, process: int) -> Crew:  # a fork has none of the threads
    return Crew(size)
