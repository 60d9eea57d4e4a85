"""A job as rank 0 sees it when the others are gone; ranks that really share out views are in tests/parallel."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from petal import ParallelError
from petal.parallel import Ranks
from petal.runs import run_job
from runs.parts import job, opened, without_time


class Alone:
    """Rank 0 of a group whose launcher says after some batches that it is over."""

    first, size = True, 1

    def __init__(self, stop_after: int) -> None:
        self.stop_after, self.met, self.told = stop_after, 0, []

    @property
    def stopping(self) -> bool:
        return self.met == self.stop_after

    def start(self, adapter: object, position: int = 0) -> int:
        self.told.append(position)
        return position

    def exchange(self, numbers: list[float]) -> None:
        self.told += numbers

    def meet(self, *_: object) -> None:
        self.met += 1

    def decided(self, needed: Any) -> Any:
        return needed

    def computes(self, view: int) -> bool:
        return True

    def gathered(self, mine: list[Any], views: int) -> list[Any]:
        return mine

    @contextmanager
    def finishing_batches(self) -> Iterator[None]:
        yield


def test_a_run_that_is_ended_leaves_a_checkpoint_of_its_last_batch(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    j = job("petal")
    whole = run_job(j, tmp_path / "whole", o)
    o.ranks = Alone(7)  # type: ignore[assignment]
    with pytest.raises(ParallelError, match=r"the launcher ended this run\. petal-o1-s0 stood at batch 7 of 30"):
        run_job(j, tmp_path, o)
    assert len(list((tmp_path / "jobs" / j.id).glob("checkpoint-*.safetensors"))) == 1
    o.ranks = again = Alone(-1)  # type: ignore[assignment]
    assert without_time(run_job(j, tmp_path, o)) == without_time(whole)
    assert again.told == [7]
    assert again.met == 23
    run_job(j, tmp_path, o)
    assert again.told == [7, -1]  # the others are told that there is nothing to do
    assert json.loads((tmp_path / "jobs" / j.id / "job.json").read_text())["status"] == "done"


@pytest.mark.parametrize(("rank", "stopping"), [(0, True), (1, None)])
def test_sigterm_waits_for_the_end_of_the_batch_on_rank_0_only(rank: int, stopping: bool | None) -> None:
    ranks = object.__new__(Ranks)
    ranks.rank, ranks.stopping = rank, False
    before = signal.getsignal(signal.SIGTERM)
    with ranks.finishing_batches():
        if rank:
            assert signal.getsignal(signal.SIGTERM) is before
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    assert ranks.stopping is bool(stopping)
    assert signal.getsignal(signal.SIGTERM) is before
