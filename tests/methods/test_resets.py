"""When methods reset themselves, by hand."""

import math

import torch
from torch import Tensor

from petal.methods.resets import Every, LossAverage


def test_a_reset_is_due_after_so_many_batches_that_count_and_once() -> None:
    every, count, seen = Every(3), torch.zeros((), dtype=torch.int64), []
    good, bad = torch.zeros(2, 5), torch.full((2, 5), math.nan)
    for logits in (good, bad, good, good, bad, bad, good, good, good):
        count, due = every.due(count, logits)
        seen.append(bool(due))
    assert seen == [False, False, False, True, False, False, False, False, True]
    assert int(count) == 6


def test_the_average_begins_with_the_first_loss_and_leaves_out_what_is_none() -> None:
    level, average = LossAverage(threshold=0.2, momentum=0.75), torch.tensor(math.inf)
    yes, no = torch.tensor(True), torch.tensor(False)

    def follow(loss: float, when: Tensor = yes) -> float:
        nonlocal average
        average = level.follow(average, torch.tensor(loss), when)
        return float(average)

    assert follow(9.0, no) == math.inf
    assert follow(0.4) == torch.tensor(0.4)
    assert math.isclose(follow(0.8), 0.75 * 0.4 + 0.25 * 0.8, rel_tol=1e-6)
    kept = float(average)
    assert follow(0.0, no) == kept
    assert follow(math.nan) == kept
    assert not level.collapsed(average)
    while follow(0.0) >= 0.2:
        assert not level.collapsed(average)
    assert level.collapsed(average)
