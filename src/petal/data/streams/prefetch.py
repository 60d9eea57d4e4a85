"""Items made ahead of the reader, in a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, none of them None, made up to `depth` ahead by one thread."""

    def following() -> T | None:
        return next(items, None)

    pool = ThreadPoolExecutor(1, thread_name_prefix="petal-prefetch")
    waiting: deque[Future[T | None]] = deque()
    try:
        waiting.extend(pool.submit(following) for _ in range(depth))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(following))
            yield item
    finally:                                # also when the reader stops early; an item being made is dropped
        pool.shutdown(wait=False, cancel_futures=True)
