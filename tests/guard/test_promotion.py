"""Which snapshots a guard goes back to: those after which every look was well."""

import torch

from guard.scripted import CLASSES, drive, guarded, put, swapped, weights

FAR = {"distance": 1e9, "update": 1e9, "drift": 1.0}                 # only what the adapter says is looked at


def test_a_snapshot_is_good_if_nothing_was_suspicious_until_the_next() -> None:
    guard = guarded(window=1200, **FAR)
    start = weights(guard)
    first, second, third = (torch.eye(CLASSES) * scale for scale in (1.125, 1.25, 1.5))
    drive(guard, 1)                                                  # what it starts with is good
    put(guard, first)
    drive(guard, 29)                                                 # 1,200 samples: the first is kept
    put(guard, swapped())
    while guard.status()["disagreement"] < 0.2:                      # suspicious: three fifths of the limit of 0.32
        drive(guard, 1)
    put(guard, second)
    while guard.status()["disagreement"] > 0.18:
        drive(guard, 1)
    assert guard.batches < 60                                        # before the next would have been taken anyway
    assert guard.alarms == []
    guard.rollback()
    assert torch.equal(weights(guard), start)

    put(guard, second)
    drive(guard, 30)                                                 # kept
    put(guard, third)
    drive(guard, 29)
    guard.rollback()
    assert torch.equal(weights(guard), start)                        # not good yet


def test_a_snapshot_after_which_all_was_well_is_good() -> None:
    guard = guarded(window=1200, **FAR)
    kept, later = torch.eye(CLASSES) * 1.125, torch.eye(CLASSES) * 1.25
    drive(guard, 1)
    put(guard, kept)
    drive(guard, 29)
    put(guard, later)
    drive(guard, 30)
    put(guard, swapped())
    guard.rollback()
    assert torch.equal(weights(guard), kept)
