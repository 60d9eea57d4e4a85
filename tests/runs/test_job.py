import errno
import json
import os
import warnings
from pathlib import Path

import pytest

from petal import Adapter, PetalWarning, evaluate
from petal.checkpoint import Checkpoints, read_state, write_state
from petal.errors import StorageError
from petal.recipes import pick_rows, recipe, rows
from petal.runs import (
    Job,
    JobProgress,
    jobs_for,
    read_records,
    run_job,
)
from runs.parts import Stop, job, known, opened, stopping_at, without_time


@pytest.mark.parametrize(  # within a domain, at its end, before the first checkpoint, at a checkpoint, before the end
    ("name", "stop"),
    [("source", 1), ("tent-online", 9), ("tent-online", 10), ("petal", 10), ("petal", 9), ("cotta", 29), ("petal+small", 9)],
)
def test_interrupted_job_gives_the_same_records(name: str, stop: int, source: Path, tmp_path: Path) -> None:
    o = opened(source)
    j = job(name)
    whole = run_job(j, tmp_path / "whole", o)
    with pytest.raises(Stop):
        run_job(j, tmp_path / "cut", o, checkpoint_every=3, progress=stopping_at(stop))
    place = tmp_path / "cut" / "jobs" / j.id
    with (place / "records.jsonl").open("a") as file:
        file.write('{"position": 99, "tor')  # as a killed process leaves it
    again = run_job(j, tmp_path / "cut", o, checkpoint_every=3)
    assert len(whole) == 30
    assert without_time(again) == without_time(whole)
    assert without_time(read_records(place)) == without_time(whole)
    one, other = (json.loads((tmp_path / w / "jobs" / j.id / "samples.json").read_text()) for w in ("whole", "cut"))
    assert one == other
    assert json.loads((place / "job.json").read_text())["status"] == "done"
    assert not list(place.glob("*checkpoint*"))


def test_same_as_evaluate_and_what_a_record_has(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    for name in ("tent-online", "petal-sres"):
        row = known()[name]
        records = run_job(Job(row), tmp_path, o)
        result = evaluate(o.adapter(row, 0), o.stream(1), reset_on_domain_change=row.reset_on_domain_change)
        assert [r["nll"] for r in records] == [r.nll for r in result.records]
        assert {"row", "order", "seed", "distance", "domain", "severity", "calibration", "restored"} <= records[0].keys()
        assert all(r["distance"] > 0 for r in records)
    assert "distance" not in run_job(job("bn"), tmp_path, o)[0]


def test_jobs_run_a_seed_only_where_it_matters(source: Path) -> None:
    known = rows(recipe("cifar10"))
    jobs = jobs_for([known["bn"], known["tent"], known["petal"]], [1, 2], [3, 4])
    assert [j.id for j in jobs] == [
        "bn-o1-s0", "bn-o2-s0", "tent-o1-s0", "tent-o2-s0", "petal-o1-s3", "petal-o1-s4", "petal-o2-s3", "petal-o2-s4",
    ]  # fmt: skip


def test_damaged_newest_checkpoint_costs_no_more_than_the_work_since_the_older(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    j = job("petal")
    whole = run_job(j, tmp_path / "whole", o)
    with pytest.raises(Stop):
        run_job(j, tmp_path, o, checkpoint_every=3, progress=stopping_at(11))
    newest, older = Checkpoints(tmp_path / "jobs" / j.id).paths()
    newest.write_bytes(newest.read_bytes()[:100])
    position = read_state(older)[0]["extra"]["position"]
    started: list[int] = []
    with pytest.warns(PetalWarning, match=f"{newest.name} is damaged"):
        again = run_job(j, tmp_path, o, progress=lambda p: started.append(p.position))
    assert started[0] == position > 0
    assert without_time(again) == without_time(whole)


@pytest.mark.parametrize("room_at", [None, 20])
def test_a_full_disk_does_not_stop_a_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_at: int | None
) -> None:
    """From batch 5 on nothing can be written: the run goes on and says so; with room again it ends well, or later does."""
    o = opened(source)
    j = job("petal")
    whole = run_job(j, tmp_path / "whole", o)
    full, fsync, reached = False, os.fsync, []

    def refusing(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    def progress(p: JobProgress) -> None:
        nonlocal full
        reached.append(p.position)
        full = p.position >= 5 and (room_at is None or p.position < room_at)

    monkeypatch.setattr(os, "fsync", refusing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if room_at is None:
            with pytest.raises(StorageError, match=r"records.jsonl: No space left on device"):
                run_job(j, tmp_path, o, checkpoint_every=2, progress=progress)
        else:
            assert without_time(run_job(j, tmp_path, o, checkpoint_every=2, progress=progress)) == without_time(whole)
    assert reached[-1] == 30
    assert any("the run goes on" in str(w.message) and "No space left" in str(w.message) for w in told)
    full, reached = False, []
    again = run_job(j, tmp_path, o, progress=lambda p: reached.append(p.position))
    assert without_time(again) == without_time(whole)
    assert reached[0] == 30 if room_at else reached[0] <= 4  # the write of batch 4 may have met the full disk


def test_what_a_killed_process_left_is_removed(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    left = tmp_path / "jobs" / "source-o1-s0" / ".samples.npz.123.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    run_job(job("source"), tmp_path, o)
    assert not left.exists()


def test_lost_records_are_made_again(source: Path, tmp_path: Path) -> None:
    """A checkpoint beyond the records (a disk that lost them) is not used."""
    o = opened(source)
    j = job("petal")
    with pytest.raises(Stop):
        run_job(j, tmp_path, o, checkpoint_every=3, progress=stopping_at(11))
    path = tmp_path / "jobs" / j.id / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    assert len(run_job(j, tmp_path, o)) == 30


def wrapped(name: str, *settings: str) -> Job:
    return Job(pick_rows(known(*settings), [name])[0])


def test_a_recurring_run_with_a_guard_in_pieces(source: Path, tmp_path: Path) -> None:
    """Stopped after any number of batches and continued by the same call: the same records, visit by visit."""
    o = opened(source, visits=2)
    j = wrapped("petal+small+guard", "guard.every=4", "small.memory=16", "small.every=8")
    whole = run_job(j, tmp_path / "whole", o)
    assert [r["visit"] for r in whole] == [0] * 30 + [1] * 30
    assert whole[-1]["guard"] == {"frozen": False, "alarms": 0, "pulls": 0, "signals": whole[-1]["guard"]["signals"]}
    assert "signals" not in whole[0]["guard"]
    assert set(whole[3]["guard"]["signals"]) >= {"disagreement", "distance"}
    place = tmp_path / "pieces" / "jobs" / j.id
    done = []
    while len(done) < 60:
        left = iter(range(16))
        done = run_job(j, tmp_path / "pieces", o, stop=lambda left=left: next(left) == 15)
        assert json.loads((place / "job.json").read_text())["status"] == ("done" if len(done) == 60 else "running")
    assert without_time(done) == without_time(whole)
    assert json.loads((place / "job.json").read_text())["options"]["guard"]["every"] == 4


def test_the_guard_s_alarms_are_in_the_records(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    nervous = ("guard.every=1", "guard.disagreement=0.01", "guard.window=16", "guard.cooldown=24", "tent.lr=1")
    j = wrapped("tent+guard", *nervous)
    with pytest.warns(PetalWarning, match="signs of a collapse"):
        records = run_job(j, tmp_path, o)
    alarms = [r["guard"]["alarm"] for r in records if "alarm" in r["guard"]]
    assert len(alarms) == records[-1]["guard"]["alarms"] > 0
    assert alarms[0].keys() == {"step", "signal", "value", "limit", "action"}
    assert any(r["guard"]["frozen"] for r in records)


def checkpoints_of(monkeypatch: pytest.MonkeyPatch, takes: float = 0.0) -> list[int]:
    """Positions of the checkpoints to come, each of which takes so many seconds to write."""
    save, found = Checkpoints.save, list[int]()

    def noted(self: Checkpoints, adapter: Adapter, extra: dict[str, object]) -> None:
        save(self, adapter, extra)
        self.wait()
        self.seconds = takes
        found.append(int(extra["position"]))

    monkeypatch.setattr(Checkpoints, "save", noted)
    return found


def test_checkpoints_are_counted_from_where_a_job_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    o, j, found = opened(source), job("tent"), checkpoints_of(monkeypatch)
    left = iter(range(5))
    run_job(j, tmp_path, o, checkpoint_every=4, stop=lambda: next(left) == 4)
    assert found == [4, 5]                                           # the last one because it was stopped
    run_job(j, tmp_path, o, checkpoint_every=4)
    assert found == [4, 5, 9, 13, 17, 21, 25, 29]


@pytest.mark.parametrize(("takes", "positions"), [(0.0, [1, 8, 15, 22, 29]), (2.0, [1, 15, 29]), (1000.0, [1])])
def test_checkpoints_take_a_twentieth_of_the_time_at_most(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, positions: list[int]
) -> None:
    """The clock is looked at three times a batch, and a checkpoint is seen to take one second, or what its writer says."""
    found = checkpoints_of(monkeypatch, takes)
    monkeypatch.setattr("petal.runs.job.SECONDS", 0.0)
    monkeypatch.setattr("petal.runs.job.time", Clock())
    run_job(job("source"), tmp_path, opened(source))
    assert found == positions


class Clock:
    """A second passes at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_the_time_of_a_job_is_that_of_all_its_pieces(source: Path, tmp_path: Path) -> None:
    o, j = opened(source), job("source")
    left = iter(range(5))
    run_job(j, tmp_path, o, stop=lambda: next(left) == 4)
    path = Checkpoints(tmp_path / "jobs" / j.id).latest()
    about, state = read_state(path)
    assert about["extra"]["seconds"] > 0
    about["extra"]["seconds"] = 1000.0
    write_state(path, state, about)
    run_job(j, tmp_path, o)
    assert 1000 < json.loads((tmp_path / "jobs" / j.id / "job.json").read_text())["seconds"] < 1200


def test_labels_in_runs_are_warned_of(source: Path, tmp_path: Path) -> None:
    runs = opened(source, images=80, batch_size=40, label_correlation=0.05)
    with pytest.warns(PetalWarning, match=r"labels of this stream come in runs, and BatchNorm goes .*METHOD\+small"):
        run_job(job("bn"), tmp_path / "runs", runs)
    run_job(job("source"), tmp_path / "source", runs)           # it does not look at the batch; a warning would be an error
    run_job(job("bn"), tmp_path / "shuffled", opened(source, images=80, batch_size=40, shuffle=True))


def test_a_batch_of_one_is_warned_of(source: Path, tmp_path: Path) -> None:
    with pytest.warns(PetalWarning, match="a batch of one sample is normalised by its own statistics"):
        run_job(job("bn"), tmp_path / "one", opened(source, images=1, batch_size=1))
    run_job(job("source"), tmp_path / "source", opened(source, images=1, batch_size=1))
