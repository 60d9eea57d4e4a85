"""The judge on readings made by hand: every rule just below and just above its limit."""

import math
from dataclasses import replace

import pytest

from petal.guard.judge import judge
from petal.guard.signals import Reading

CLASSES = 10
LIMITS = {"disagreement": 0.5, "concentration": 0.25, "entropy": 0.25, "distance": 3.0, "update": 10.0, "drift": 0.04}
USUAL = {"distance": 1.0, "update": 0.1}
MOST = math.log(CLASSES)
WELL = Reading(
    concentration=0.1, entropy=0.2 * MOST, confidence=0.9, disagreement=0.05, distance=1.0, update=0.1, drift=0.0,
    paired_concentration=0.1, source_concentration=0.1, source_entropy=0.2 * MOST, source_confidence=0.9,
)  # fmt: skip


def verdict(looks=8, usual=USUAL, classes=CLASSES, **changes):
    return judge(replace(WELL, **changes), usual, LIMITS, looks, classes)


def test_nothing_wrong() -> None:
    found = verdict()
    assert (found.alarm, found.healthy, found.worn) == (None, True, False)


# the limit of disagreement is 0.5 * (1 - 1/10) = 0.45; 1.3 of it is 0.585, and 0.6 of it 0.27
@pytest.mark.parametrize(
    ("changes", "signal", "value", "limit"),
    [
        ({"disagreement": 0.584}, None, 0, 0),
        ({"disagreement": 0.586}, "disagreement", 0.586, 0.585),
        ({"disagreement": 0.449, "distance": 3.1}, None, 0, 0),
        ({"disagreement": 0.451, "distance": 3.1}, "disagreement", 0.451, 0.45),
        ({"disagreement": 0.451, "distance": 2.9}, None, 0, 0),
        ({"disagreement": 0.451, "update": 1.1}, "disagreement", 0.451, 0.45),
        ({"disagreement": 0.451, "entropy": 0.46 * MOST}, "disagreement", 0.451, 0.45),
        ({"disagreement": 0.451, "paired_concentration": 0.36}, "disagreement", 0.451, 0.45),
        ({"disagreement": 0.9, "source_entropy": 0.51 * MOST}, None, 0, 0),                 # the source is lost
        ({"disagreement": 0.9, "source_entropy": 0.49 * MOST}, "disagreement", 0.9, 0.585),
        ({"disagreement": 0.9, "source_concentration": 0.36}, None, 0, 0),                  # it sees fewer classes
        ({"disagreement": 0.9, "source_concentration": 0.34}, "disagreement", 0.9, 0.585),
        ({"paired_concentration": 0.59}, None, 0, 0),
        ({"paired_concentration": 0.61}, "concentration", 0.51, 0.5),
        ({"paired_concentration": 0.36, "disagreement": 0.26}, None, 0, 0),
        ({"paired_concentration": 0.36, "disagreement": 0.28}, "concentration", 0.26, 0.25),
        ({"entropy": 0.46 * MOST, "disagreement": 0.26}, None, 0, 0),
        ({"entropy": 0.46 * MOST, "disagreement": 0.28}, "entropy", 0.26, 0.25),
        ({"entropy": 0.44 * MOST, "disagreement": 0.28}, None, 0, 0),
        ({"confidence": 0.149}, "confidence", 0.149, 0.15),
        ({"confidence": 0.151}, None, 0, 0),
        ({"confidence": 0.14, "source_confidence": 0.27}, None, 0, 0),
        ({"confidence": 0.14, "source_confidence": 0.29}, "confidence", 0.14, 0.15),
        ({"distance": 3.1, "update": 0.9}, None, 0, 0),
        ({"distance": 2.9, "update": 1.1}, None, 0, 0),
        ({"distance": 3.1, "update": 1.1}, "update", 1.1, 1.0),
        ({"distance": math.nan}, "distance", math.nan, math.inf),
        ({"source_entropy": math.inf}, "disagreement", 0.05, math.inf),
    ],
)
def test_alarms(changes, signal, value, limit) -> None:
    alarm = verdict(**changes).alarm
    assert (None if alarm is None else alarm[0]) == signal
    if alarm is not None:
        assert alarm[1:] == pytest.approx((value, limit), nan_ok=True)


def test_comparisons_count_from_the_eighth_and_weights_at_once() -> None:
    assert verdict(looks=7, disagreement=0.9).alarm is None
    assert verdict(looks=8, disagreement=0.9).alarm is not None
    assert verdict(looks=1, distance=3.1, update=1.1).alarm is not None
    assert verdict(looks=1, usual={"distance": 0.0, "update": 0.0}, distance=1e9, update=1e9).alarm is None
    assert not verdict(looks=7, drift=0.05).worn
    assert verdict(looks=8, drift=0.05).worn


def test_what_is_no_alarm_may_be_suspicious() -> None:
    assert verdict(disagreement=0.26).healthy
    assert not verdict(disagreement=0.28).healthy
    assert verdict(disagreement=0.28, source_entropy=0.51 * MOST).healthy       # by a source that is no judge
    assert verdict(paired_concentration=0.34).healthy
    assert not verdict(paired_concentration=0.36).healthy


def test_wear_is_drift_over_its_limit_by_a_source_that_is_a_judge() -> None:
    assert not verdict(drift=0.039).worn
    assert verdict(drift=0.041).worn
    assert not verdict(drift=0.041, source_entropy=0.51 * MOST).worn
