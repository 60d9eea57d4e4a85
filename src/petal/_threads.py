"""Threads that take whole pieces of work, each on a core of its own."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

Drawn = TypeVar("Drawn")


class Crew:
    """Threads for whole views of a batch.

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
