"""A network for batches of one shape: as it is, compiled, or compiled and recorded as CUDA graphs."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petal.engine.policy import record, side_stream, side_streams, warm_up
from petal.methods.network import outputs_of

if TYPE_CHECKING:
    from petal.engine.engine import Engine

log = logging.getLogger(__name__)


class Room:
    """Memory that the graphs of several programs share. While one waits for its backward pass, others go elsewhere."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.waiting: Program | None = None


class Program:
    """What a network returns for batches of one shape: its logits, or features and logits, in the adapter's precision.

    With `learns`, gradients can go back through the result, once. `low` is the precision to multiply in, if it is another.
    Of several batches at a time, each runs on a stream of its own: while one waits for memory, another multiplies.
    """

    def __init__(
        self, engine: "Engine", network: Any, x: Tensor, low: torch.dtype | None, *,
        learns: bool, room: Room, compiled: bool, batches: int = 1,
    ) -> None:  # fmt: skip
        self.engine, self.network, self.low, self.learns, self.room = engine, network, low, learns, room
        self.device, self.dtype = engine.adapter.device, engine.adapter.dtype
        cuda = self.device.type == "cuda"
        self.inputs = [engine.empty_like(x) for _ in range(batches)]
        self.streams = [side_stream(torch.cuda.current_device(), n) for n in range(1, batches)] if cuda else []
        self.results: list[tuple[Tensor, ...]] = []
        self.back: list[Tensor] = []                                # gradients of the results
        self.replay: Callable[[], None] | None = None
        self.replay_back: Callable[[], None] | None = None
        self.compiled, self.records = compiled, compiled and cuda

    def run(self, batches: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
        """The results, on tensors that the next run of this room writes over. A batch is copied before the next is made."""
        for place, x in zip(self.inputs, batches, strict=True):
            place.copy_(x, non_blocking=True)
        if self.records and self.replay is None and self.engine.records_now:
            self._record()
        (self.replay or self._forward)()
        return [tuple(tensor.detach() for tensor in result) for result in self.results]

    def run_to_learn(self, x: Tensor) -> tuple[Tensor, ...]:
        """The results, copied, with a graph that leads back to the weights."""
        self.run([x])
        self.room.waiting = self
        found: tuple[Tensor, ...] = _Through.apply(self.engine.anchor, self)  # type: ignore[no-untyped-call]
        return found

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the weights to what is there, scaled as the descent keeps them."""
        descent = self.engine.descent
        assert descent is not None
        scaled = descent.scaled(gradients)
        for place, gradient in zip(self.back, scaled, strict=True):
            place.copy_(gradient)
        if self.replay_back is None:
            with descent.receiving():
                self._backward()
        else:
            self.replay_back()
        self.release()

    def release(self) -> None:
        """Nothing waits any more. A graph that is kept would tie the weights' gradients to the stream that it ran on."""
        self.room.waiting = None
        self.results = [tuple(tensor.detach() for tensor in result) for result in self.results]

    def _forward(self) -> None:
        self.back, self.results = [], []
        with side_streams if self.streams else nullcontext():
            for stream in self.streams:
                stream.wait_stream(torch.cuda.current_stream())
            for x, on in zip_longest(self.inputs, [None, *self.streams]):
                with nullcontext() if on is None else torch.cuda.stream(on):
                    self.results.append(self._result(x))
            for stream, result in zip(self.streams, self.results[1:], strict=False):
                torch.cuda.current_stream().wait_stream(stream)
                for tensor in result:
                    tensor.record_stream(torch.cuda.current_stream())
        if self.low is not None:
            for result in self.results:
                self.engine.in_range.logical_and_(result[-1].detach().isfinite().all())
        if self.learns:
            self.back = [torch.empty_like(tensor) for tensor in self.results[0]]

    def _result(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.learns), self.engine.autocast(self.low):
            return tuple(tensor.to(self.dtype) for tensor in outputs_of(self.network, x))

    def _backward(self) -> None:
        inputs = list(self.engine.adapter.adapted.values())
        wanted = [(out, grad) for out, grad in zip(self.results[0], self.back, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted], inputs=inputs)

    def _both(self) -> None:
        self._forward()
        for place in self.back:
            place.zero_()
        self._backward()

    def _record(self) -> None:
        """Record forward and backward pass as graphs. What cannot be recorded runs as it is, and the log says why."""
        kept = [(buffer, buffer.clone()) for buffer in getattr(self.network, "buffers", tuple)()]
        try:
            if self.learns and self.engine.descent is not None:
                gradient = self.engine.descent.grad
                kept.append((gradient, gradient.cpu()))     # it may hold weights, and gets zeros times what is not finite
                self.engine.descent.link_gradients()
                warm_up(self._both)
                self.replay = record(self._forward, self.room.pool)
                self.replay_back = record(self._backward, self.room.pool)
                self.results = [tuple(tensor.detach() for tensor in result) for result in self.results]
            else:
                warm_up(self._forward)
                self.replay = record(self._forward, self.room.pool)
        except Exception as error:
            log.warning("this network cannot run as a CUDA graph and runs without: %s", error)
            torch.cuda.synchronize()
            self.records, self.replay, self.replay_back = False, None, None
            self.room.pool = torch.cuda.graph_pool_handle()
        for tensor, value in kept:
            tensor.copy_(value)


class _Through(torch.autograd.Function):
    """Lets gradients by the results of a program go on through its own backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, program: Program) -> tuple[Tensor, ...]:
        ctx.program = program
        return tuple(tensor.detach().clone() for tensor in program.results[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.program.backward(gradients)
        return None, None
