"""When a guard raises an alarm, to the look and to the number."""

import math

import pytest
import torch

from guard.scripted import CLASSES, alarm, drive, guarded, put


@pytest.mark.parametrize("every", [1, 3])
def test_the_source_is_asked_eight_times_before_it_counts(every: int) -> None:
    """Everything is class 0 from the first batch on."""
    guard = guarded("warn", every=every, window=10**6)
    collapsed = torch.zeros(CLASSES, CLASSES)
    collapsed[0] = 8.0
    put(guard, collapsed)
    drive(guard, 8 * every - 1)
    assert guard.alarms == []
    with alarm(guard):
        drive(guard, 1)
    assert guard.alarms[0].step == 8 * every


def test_the_way_is_measured_over_batches_that_learn() -> None:
    """The same steps after a long rest are as long as before it."""
    guard = guarded("warn", window=10**6)
    way = torch.zeros(CLASSES, CLASSES)
    way[0, 0], way[2, 1] = 3e-4, 4e-4
    guard.method.way = way
    drive(guard, 6)
    step = 5e-4 / math.sqrt(CLASSES)                                 # of the source's length
    assert guard.status()["update"] == pytest.approx(step, rel=1e-3)
    guard.rollback()
    guard.freeze()
    drive(guard, 300)
    assert guard.status()["update"] == 0.0
    guard.thaw()
    for _ in range(4):
        drive(guard, 1)
        assert guard.status()["update"] == pytest.approx(step, rel=1e-3)


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_a_runaway_after_a_rest_is_seen_as_soon_as_without_it() -> None:
    def batches_until_seen(rest: int) -> int:
        guard = guarded("warn", window=10**6)
        guard.method.way = torch.full((CLASSES, CLASSES), 1e-5)
        drive(guard, 40)
        guard.rollback()
        guard.freeze()
        drive(guard, rest)
        guard.thaw()
        guard.method.way = guard.method.way * 100
        start = guard.batches
        while not guard.alarms and guard.batches - start < 20:
            drive(guard, 1)
        assert [a.signal for a in guard.alarms] == ["update"]
        return guard.batches - start

    assert batches_until_seen(0) == batches_until_seen(500) < 10
