"""The queue by itself: what is taken into it, what is turned away, and when to come again."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from petal.serve.queue import ADAPT, PREDICT, Busy, Closed, RequestQueue
from petal.serve.settings import Settings
from petal.serve.watch import Metrics, Watch


def queue(**settings: Any) -> RequestQueue:
    return RequestQueue(Settings(**{"batch_size": 8, "queue": 10} | settings), Watch(Metrics(8, (("model", "m"),))))


def samples(count: int) -> Tensor:
    return torch.zeros(count, 1)


def test_what_fits_is_taken_and_an_empty_queue_takes_anything() -> None:
    one = queue()
    one.submit(samples(11))
    with pytest.raises(Busy):
        one.submit(samples(1))
    two = queue()
    two.submit(samples(4))
    two.check_room()
    two.submit(samples(6))
    assert two.waiting == 10
    with pytest.raises(Busy):
        two.submit(samples(1))
    with pytest.raises(Busy):
        two.check_room()


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1), (1000.0, 1), (10.0, 1), (9.9, 2), (3.0, 4), (0.35, 29), (0.1, 30)])
def test_when_to_come_again_is_told_in_whole_seconds_up_to_thirty(rate: float, seconds: int) -> None:
    one = queue()
    one.submit(samples(10))
    one._rate = rate
    assert one.retry_after() == seconds
    with pytest.raises(Busy, match=f"try again in {seconds} s") as error:
        one.submit(samples(1))
    assert error.value.retry_after == seconds


def test_what_was_dropped_waits_no_more() -> None:
    one = queue()
    futures: list[Future[Any]] = [one.submit(samples(3)), one.submit(samples(4))]
    assert futures[0].cancel()
    one.abandon()
    assert (one.waiting, one._take(ADAPT)) == (0, [])
    assert isinstance(futures[1].exception(0), Closed)
    for call in (one.check_room, lambda: one.submit(samples(1))):
        with pytest.raises(Closed):
            call()


def test_a_batch_is_of_one_target_and_no_larger_than_it_may_be() -> None:
    one = queue(queue=100)
    for count, target in ((3, ADAPT), (2, PREDICT), (5, ADAPT), (1, ADAPT), (1, PREDICT)):
        one.submit(samples(count), target)
    assert [len(item.x) for item in one._take(ADAPT)] == [3, 5]
    assert one.waiting == 4
    assert one.watch.metrics.queue._value.get() == 4
    assert [len(item.x) for item in one._take(PREDICT)] == [2, 1]
    assert [len(item.x) for item in one._take(ADAPT)] == [1]
    assert one.waiting == 0
