"""How long a guard keeps learning off after an alarm: twice as long each time, up to 256 times, until forgotten."""

import pytest

from guard.scripted import break_down, drive, guarded
from petal import Guard

FIRST = 40                                                           # samples of the first cool-down


def rest(guard: Guard) -> int:
    """Let the cool-down after an alarm pass; its length in samples, a multiple of 20."""
    samples = 0
    while guard.frozen:
        drive(guard, 1, 20)
        samples += 20
    return samples


def test_alarms_in_a_row_are_forgotten_after_a_hundred_cool_downs() -> None:
    guard = guarded(cooldown=FIRST)
    drive(guard, 1)
    lengths = []
    for calm in (0, 0, 0, 100 * FIRST, 100 * FIRST + 20, 0):         # samples from one alarm to the next, at least
        passed = 20                                                  # of the batch that breaks down
        if guard.alarms:
            passed += rest(guard)
            lengths.append(passed - 20)
        while passed < calm:
            drive(guard, 1, 20)
            passed += 20
        break_down(guard, 20)
    lengths.append(rest(guard))
    assert lengths == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, FIRST, 2 * FIRST]


@pytest.mark.parametrize(("alarms", "times"), [(1, 1), (8, 128), (9, 256), (10, 256), (13, 256)])
def test_it_doubles_no_more_than_eight_times(alarms: int, times: int) -> None:
    """Thawed by hand after each alarm but the last, so that one follows the other."""
    guard = guarded(cooldown=FIRST)
    drive(guard, 1)
    for _ in range(alarms - 1):
        break_down(guard, 20)
        guard.thaw()
    break_down(guard, 20)
    drive(guard, 1, times * FIRST - 1)
    assert guard.frozen
    drive(guard, 1, 1)
    assert not guard.frozen
