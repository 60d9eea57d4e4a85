"""Choices of execution, in one place."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any

import torch


@dataclass
class Policy:
    """How networks run: precision of matrix products, compilation, and which batch shapes are worth it.

    With `shapes`, exactly those are compiled, from their first batch on: results then do not depend on where a stream
    was begun. Without, a shape is compiled when it has come `compile_after` times, and at most `compiled_shapes` are.
    """

    low: torch.dtype | None = None
    low_views: torch.dtype | None = None  # where `low` is none: that of the teacher on views and of the source's gate
    compile: bool = False
    compile_after: int = 2
    compiled_shapes: int = 3
    shapes: frozenset[torch.Size] | None = None
    backend: str = "inductor"  # what compiles
    inference_options: dict[str, Any] = field(default_factory=dict)  # the compiler's, for networks that only predict
    measured_options: dict[str, Any] = field(default_factory=dict)  # for all: their outcome depends on what is fast here
    view_threads: int = 1  # on a CPU: so many views at a time, each on a core of its own
    view_streams: int = 1  # on a GPU: so many views at a time, each on a stream of its own

    def due(self, shape: torch.Size, times: int, compiled: int) -> bool:
        """True if a shape that has come `times` times is to be compiled, `compiled` others being so already."""
        if not self.compile:
            return False
        if self.shapes is not None:
            return shape in self.shapes
        return times >= self.compile_after and compiled < self.compiled_shapes

    def algorithms(self, shape: torch.Size, seen: Collection[torch.Size]) -> AbstractContextManager[None]:
        """How cuDNN chooses for a batch of this shape: the best for those to be compiled, as far as can be told.

        Trying takes a second, so of shapes that are not named only the first and those seen before count as coming again.
        """
        expected = shape in (self.shapes if self.shapes is not None else seen or {shape})
        return best_algorithms() if self.compile and expected and not fixed_algorithms() else nullcontext()

    def compiler(
        self, function: Callable[..., Any], inference: bool = False, one_thread: bool = False, alike: bool = False
    ) -> Any:
        """The compiled form of a network or function, for fixed shapes; the number of its threads is compiled into it.

        If it is to round `alike` wherever it is compiled, nothing is measured on the way.
        """
        options = dict(self.inference_options) if inference else {}
        if not (alike or fixed_algorithms()):
            options |= self.measured_options
        if one_thread:  # C++ from end to end lets go of Python's lock while it runs: other threads do not wait
            options |= {"cpp.threads": 1, "cpp_wrapper": True}
        return torch.compile(function, backend=self.backend, dynamic=False, options=options or None)


def fixed_algorithms() -> bool:
    """True if the user wants the same numbers every time, and so no choice by what happens to be fast."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def warm_up(body: Callable[[], None], times: int = 3) -> None:
    """Run what is to be recorded: the compiler and cuDNN do now what they do on a first call."""
    torch.cuda.empty_cache()  # the memory of a program that this one follows
    with side_streams:
        side = side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(times):
                body()
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()  # what the warm-up needed, the graph's pool cannot use


def record(body: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Record it as a CUDA graph in a memory pool, and return what replays it."""
    with side_streams:
        side = side_stream(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side), torch.cuda.graph(graph, pool=pool, stream=side):  # leaves its stream if that fails
            body()
    return graph.replay


side_streams = RLock()  # held by who works on them: what another thread does there meanwhile would be recorded too


@functools.cache
def side_stream(device: int, number: int = 0) -> torch.cuda.Stream:
    """A stream of the engine's, the same for all graphs: cuBLAS keeps 32 MiB for every stream it has ever worked on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def best_algorithms() -> Iterator[None]:
    """cuDNN tries its algorithms for each convolution that it has not met yet, and keeps the fastest.

    One that it has met outside of this keeps the algorithm that was guessed then, in here too. So all work on a batch
    shape that is to be compiled belongs in here, from its first batch on. The switch is one for all threads: the first to
    come in turns it on, the last to leave puts it back.
    """
    global _inside, _before
    with _switch:
        if not _inside:
            _before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        _inside += 1
    try:
        yield
    finally:
        with _switch:
            _inside -= 1
            if not _inside:
                torch.backends.cudnn.benchmark = _before


_switch = Lock()
_inside, _before = 0, False
