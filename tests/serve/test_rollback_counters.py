"""What is counted since some moment goes on from the version that is rolled back to: alarms, steps to the next snapshot.

So it does after a restart.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import petal
from networks import images, network
from petal.serve.worker import Worker
from serve.parts import WAIT, worker

ALARM = torch.zeros(4, 3, 8, 8)


class Fragile(petal.Tent):
    """Black images leave weights that are no numbers behind."""

    def step(self, x: Tensor) -> Tensor:
        logits = super().step(x)
        if not x.any():
            with torch.no_grad():
                next(iter(self.adapted.values())).fill_(math.nan)
        return logits


def fragile() -> petal.Adapter:
    return petal.Guard(Fragile(network(), lr=1e-3), every=1, cooldown=1)


def send(one: Worker, *batches: Tensor) -> None:
    for x in batches:
        one.submit(x).result(WAIT)
    one.act("digest", "test").result(WAIT)                           # all that comes after a batch is done too


def alarms(folder: Path) -> int:
    """In the audit log."""
    return sum(json.loads(line)["by"] == "guard" for line in (folder / "audit.jsonl").read_text().splitlines())


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_an_alarm_after_a_roll_back_to_fewer_alarms_is_audited(tmp_path: Path) -> None:
    one = worker(tmp_path, fragile)
    one.start()
    send(one, images(4))
    one.act("snapshot", "test").result(WAIT)                         # version 1, before any alarm
    send(one, ALARM, images(4), images(4))
    assert alarms(tmp_path) == 1
    one.act("rollback", "test", version=1).result(WAIT)
    send(one, ALARM)
    assert (alarms(tmp_path), one.watch.totals["alarms"]) == (2, 2)
    one.act("reset", "test").result(WAIT)
    send(one, images(4), ALARM)
    assert (alarms(tmp_path), one.watch.totals["alarms"]) == (3, 3)
    one.close()
    one.join(WAIT)


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_an_alarm_is_not_audited_again_after_a_roll_back_to_it(tmp_path: Path) -> None:
    one = worker(tmp_path, fragile)
    one.start()
    send(one, images(4), ALARM, images(4), images(4))
    version = one.version
    one.act("snapshot", "test").result(WAIT)                         # with one alarm
    one.act("reset", "test").result(WAIT)
    send(one, images(4))
    one.act("rollback", "test", version=version).result(WAIT)
    send(one, images(4))
    assert (alarms(tmp_path), one.watch.totals["alarms"]) == (1, 1)
    one.close()
    one.join(WAIT)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("action", ["rollback", "reset"])
def test_the_next_snapshot_is_a_full_turn_after_a_roll_back(tmp_path: Path, action: str, kept: bool) -> None:
    """Also where the version that was left had been kept shortly before."""
    one = worker(tmp_path, snapshot_every=4)
    one.start()

    def regular() -> list[int]:
        return [v.number for v in one.versions.list() if v.reason == "regular"]

    send(one, *[images(4)] * 3)
    if kept:
        one.act("snapshot", "test").result(WAIT)
    one.act(action, "test", **({"version": 0} if action == "rollback" else {})).result(WAIT)
    send(one, *[images(4)] * 3)
    assert regular() == []
    send(one, images(4))
    assert regular() == [7]
    send(one, *[images(4)] * 4)
    assert regular() == [7, 11]
    one.close()
    one.join(WAIT)


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_a_restart_audits_no_alarm_again_and_takes_no_snapshot_too_early(tmp_path: Path) -> None:
    one = worker(tmp_path, fragile, snapshot_every=6)
    one.start()
    send(one, images(4), ALARM, images(4), images(4))
    assert alarms(tmp_path) == 1
    one.close()
    one.join(WAIT)
    two = worker(tmp_path, fragile, snapshot_every=4)
    done = two.steps
    assert done < 4
    two.start()
    send(two, *[images(4)] * 3)
    assert alarms(tmp_path) == 1
    assert [v.number for v in two.versions.list()] == [0]
    send(two, images(4))
    assert [v.number for v in two.versions.list()] == [0, done + 4]
    two.close()
    two.join(WAIT)
