"""Choices of execution, in one place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Policy:
    """How networks run: precision of matrix products, compilation, and from when on a batch shape is worth it."""

    low: torch.dtype | None = None
    compile: bool = False
    compile_after: int = 2
    compiled_shapes: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def compiler(self, network: nn.Module) -> Any:
        """The compiled form of a network, for fixed shapes."""
        return torch.compile(network, dynamic=False, **self.options)


def record(body: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Run `body` to warm it up, record it as a CUDA graph in a memory pool, and return what replays it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        body()
    return graph.replay
