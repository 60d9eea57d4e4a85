"""Requests on their way to the worker: a bounded queue, in order of arrival, taken in batches for one target."""

import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from petal.errors import PetalError
from petal.serve.settings import Settings
from petal.serve.watch import Watch

ADAPT, PREDICT, SOURCE = "adapt", "predict", "source"   # targets of a request; any other is the number of a version


class Busy(PetalError):
    """The queue is full; try again after some seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full: try again in {retry_after} s")
        self.retry_after = retry_after


class Closed(PetalError):
    """The server is shutting down."""

    retry_after = 5

    def __init__(self) -> None:
        super().__init__("the server is shutting down: try again in 5 s, here or elsewhere")


@dataclass(frozen=True)
class Answer:
    """What a request gets: float32 [n, classes] twice, int64 [n], float32 [n], and which weights they come from."""

    logits: NDArray[np.float32]
    probabilities: NDArray[np.float32]
    label: NDArray[np.int64]
    entropy: NDArray[np.float32]
    version: str
    adapted: bool


@dataclass
class Item:
    """A request that waits: samples [n, ...], the source of images they are from, and who gets their answer."""

    x: Tensor
    target: str
    arrived: float
    stream: str | int | None = None
    future: "Future[Answer]" = field(default_factory=Future)


class RequestQueue:
    """What other threads call; the worker, which is one, takes from it."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self.settings, self.watch = settings, watch
        self.waiting = 0                    # samples in the queue
        self._queue: deque[Item] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._rate = 0.0                    # samples per second while at work

    def submit(self, x: Tensor, target: str = ADAPT, stream: str | int | None = None) -> "Future[Answer]":
        """Accept samples [n, ...] on the CPU for a target, from one source of images, or raise `Busy` or `Closed`."""
        item = Item(x, target, time.monotonic(), stream)
        with self._change:
            if self._closing:
                raise Closed
            if self.waiting and self.waiting + len(x) > self.settings.waiting:
                raise Busy(self.retry_after())      # a queue that is empty takes any request
            self._queue.append(item)
            self.waiting += len(x)
            self._change.notify()
        return item.future

    def check_room(self) -> None:
        """Raise what `submit` would raise for one sample: lets a request be refused before its body is read."""
        if self._closing:
            raise Closed
        if self.waiting >= self.settings.waiting:
            raise Busy(self.retry_after())

    def retry_after(self) -> int:
        """Whole seconds until the queue will have been worked off."""
        return min(30, max(1, math.ceil(self.waiting / self._rate))) if self._rate else 1

    def close(self) -> None:
        """Accept nothing more, answer what was accepted, checkpoint, and end."""
        with self._change:
            self._closing = True
            self._change.notify()

    def abandon(self) -> None:
        """Refuse what still waits; the batch that is being computed is answered."""
        with self._change:
            self._closing = True
            dropped, self.waiting = list(self._queue), 0
            self._queue.clear()
            self._change.notify()
        for item in dropped:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(Closed())

    @property
    def closing(self) -> bool:
        """True once nothing more is accepted."""
        return self._closing

    def _take(self, target: str) -> list[Item]:
        """The next batch: requests for one target in the order of their arrival, as many as fit."""
        taken, total = [], 0
        for item in self._queue:
            if item.target == target:
                if total + len(item.x) > self.settings.batch_size:
                    break
                taken.append(item)
                total += len(item.x)
        chosen = {id(item) for item in taken}
        self._queue = deque(item for item in self._queue if id(item) not in chosen)
        self.waiting -= total
        self.watch.metrics.queue.set(self.waiting)
        return taken
