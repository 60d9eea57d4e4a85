"""kill -9 at every named point of a step and of a checkpoint's write, and at random times: nothing is lost or done twice."""

import signal
from pathlib import Path

import pytest

from killed import POINTS, Processes, outcome

STEP = ["after backward", "before the optimizer", "between EMA and restore", "after the step", "mid-record"]


@pytest.fixture(scope="module")
def processes() -> Processes:
    return Processes()


@pytest.fixture(scope="module")
def alone(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What an uninterrupted run gives, by engine."""
    folder = tmp_path_factory.mktemp("alone")
    out = {}
    for engine in ("eager", "auto"):
        assert processes.run(folder / engine, 1, engine) == 0
        out[engine] = records, made, _ = outcome(folder / engine)
        assert [r["position"] for r in records] == list(range(15)) == sorted(made)
        assert all(len(predictions) == 1 for predictions in made.values())
    assert len({next(iter(p)) for p in out["eager"][1].values()}) == 15
    return out


@pytest.mark.parametrize(
    ("point", "times"),
    [(p, 9 if p in STEP or p.endswith("engine") or p == "before the checkpoint" else 2) for p in POINTS]
    + [("between EMA and restore", 1), ("mid-write", 1), ("before the folder's fsync", 1)],
)
def test_killed_at(point: str, times: int, processes: Processes, alone: dict[str, object], tmp_path: Path) -> None:
    engine = "auto" if point.endswith("engine") else "eager"
    assert processes.run(tmp_path, 1, engine, point, times) == -signal.SIGKILL
    assert not (tmp_path / "state.json").exists()
    assert processes.run(tmp_path, 1, engine) == 0
    if point == "before the oldest goes" and not (tmp_path / "state.json").exists():  # that was after the job was done
        (tmp_path / "state.json").write_text(alone[engine][2])
    assert outcome(tmp_path) == alone[engine]
    job = tmp_path / "jobs" / "petal-o1-s0"
    assert sorted(p.name for p in job.iterdir()) == [
        ".lock", "job.json", "records.jsonl", "samples.json", "samples.npz",
    ]  # fmt: skip


@pytest.mark.parametrize("point", ["after backward", "between EMA and restore", "after the step", "mid-write"])
def test_killed_with_a_guard_and_a_memory(point: str, processes: Processes, tmp_path: Path) -> None:
    """Windows, snapshots, estimates and the memory continue too."""
    row = "petal+small+guard"
    for name in ("alone", "killed"):
        if name == "killed":
            assert processes.run(tmp_path / name, 1, "eager", point, 6, row) == -signal.SIGKILL
        assert processes.run(tmp_path / name, 1, "eager", None, 1, row) == 0
    assert outcome(tmp_path / "killed", row) == outcome(tmp_path / "alone", row)


def test_killed_again_and_again(processes: Processes, alone: dict[str, object], tmp_path: Path) -> None:
    for point in ("mid-write", "between EMA and restore", "before rename", "after the step", "before the folder's fsync"):
        assert processes.run(tmp_path, 1, "eager", point, 2) == -signal.SIGKILL
    assert processes.run(tmp_path, 1, "eager") == 0
    assert outcome(tmp_path) == alone["eager"]


@pytest.mark.parametrize(("kills", "batches"), [(5, 1), pytest.param(50, 4, marks=pytest.mark.soak)])
def test_killed_at_random_times(kills: int, batches: int, processes: Processes, tmp_path: Path) -> None:
    killed, done = processes.kill_at_random(tmp_path, kills, batches, seed=kills)
    assert killed == kills
    alone = outcome(tmp_path / "0")
    assert len(alone[0]) == 15 * batches
    for number in range(1, done):
        assert outcome(tmp_path / str(number)) == alone
