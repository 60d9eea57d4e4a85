"""Choices of execution, in one place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Policy:
    """How networks run: precision of matrix products, compilation, and which batch shapes are worth it.

    With `shapes`, exactly those are compiled, from their first batch on: results then do not depend on where a stream
    was begun. Without, a shape is compiled when it has come `compile_after` times, and at most `compiled_shapes` are.
    """

    low: torch.dtype | None = None
    compile: bool = False
    compile_after: int = 2
    compiled_shapes: int = 3
    shapes: frozenset[torch.Size] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    inference_options: dict[str, Any] = field(default_factory=dict)
    view_threads: int = 1  # on a CPU: so many views at a time, each on a core of its own

    def due(self, shape: torch.Size, times: int, compiled: int) -> bool:
        """Whether a shape that has come `times` times is to be compiled, `compiled` others being so already."""
        if not self.compile:
            return False
        if self.shapes is not None:
            return shape in self.shapes
        return times >= self.compile_after and compiled < self.compiled_shapes

    def compiler(self, function: Callable[..., Any], inference: bool = False, one_thread: bool = False) -> Any:
        """The compiled form of a network or function, for fixed shapes; the number of its threads is compiled into it."""
        options = {**self.options, **(self.inference_options if inference else {})}
        if one_thread:  # C++ from end to end lets go of Python's lock while it runs: other threads do not wait
            options["options"] = {**options.get("options", {}), "cpp.threads": 1, "cpp_wrapper": True}
        return torch.compile(function, dynamic=False, **options)


def record(body: Callable[[], None], pool: Any, warmup: int = 3) -> Callable[[], None]:
    """Run `body` to warm it up, record it as a CUDA graph in a memory pool, and return what replays it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    # shapes stay the same, so it pays to let cuDNN try its algorithms
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
        with torch.cuda.stream(side):
            for _ in range(warmup):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # what the warm-up needed, the graph's pool cannot use
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            body()
    return graph.replay
