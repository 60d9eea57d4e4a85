"""What a folder of runs is said to hold, against runs that really are done, stopped, running, or damaged."""

import json
import shutil
from pathlib import Path

import pytest

from petal import ConfigError
from petal._files import alone, is_taken
from petal.cli.runs import table
from petal.runs import make_manifest, open_run, run_job
from petal.runs.listing import Listed, list_runs
from runs.parts import Stop, job, opened, stopping_at


def only(folder: Path) -> Listed:
    (found,) = list_runs(folder)
    return found


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs of 30 batches: one done, one stopped after 11."""
    o, folder = opened(source), tmp_path_factory.mktemp("whole")
    jobs = [job("bn"), job("tent")]
    open_run(folder, make_manifest(o, jobs))
    run_job(jobs[0], folder, o)
    with pytest.raises(Stop):
        run_job(jobs[1], folder, o, checkpoint_every=5, progress=stopping_at(11))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "runs" / "digits"))


def test_done_stopped_running(run: Path, source: Path) -> None:
    found = only(run.parent)
    assert (found.path, found.kind, found.about, found.state) == (run, "run", "digits", "resumable")
    assert (found.rows, found.orders, found.seeds) == (("bn", "tent"), (1,), (0,))
    assert (found.done, found.total) == (41, 60)
    assert found.size == sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert found.when is not None
    with alone(run / "jobs" / "tent-o1-s0"):
        assert is_taken(run / "jobs" / "tent-o1-s0")
        assert only(run).state == "running"
    assert only(run).state == "resumable"
    run_job(job("tent"), run, opened(source))
    assert (only(run).state, only(run).done) == ("done", 60)


def test_a_job_that_was_never_begun_counts(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    open_run(tmp_path, make_manifest(o, [job("bn"), job("tent")]))
    found = only(tmp_path)
    assert (found.state, found.done, found.total) == ("resumable", 0, None)
    run_job(job("bn"), tmp_path, o)
    found = only(tmp_path)
    assert (found.state, found.done, found.total) == ("resumable", 30, 60)


def test_what_is_broken_says_why(run: Path) -> None:
    records = run / "jobs" / "bn-o1-s0" / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    found = only(run)
    assert (found.state, found.note) == ("broken", "bn-o1-s0: is called done, with 7 of 30 batches")
    records.write_bytes(whole)
    (run / "jobs" / "bn-o1-s0" / "job.json").write_text("{")
    assert "job.json cannot be read" in only(run).note
    (run / "manifest.json").write_text('{"format": "petal-run-9"}')
    assert "its format is not" in only(run).note
    assert only(run).state == "broken"


def test_all_kinds_and_nothing_else(run: Path, tmp_path: Path, source: Path) -> None:
    place = tmp_path / "runs"
    (place / "tune-digits.json").write_text(json.dumps({"format": "petal-tune-2", "recipe": "digits", "row": "tent"}))
    (place / "p.csv").write_text("image\n")
    (place / "p.json").write_text(json.dumps({"format": "petal-apply-1", "network": "small", "method": "eta"}))
    (place / "q.progress").mkdir()
    (place / "q.progress" / "state.json").write_text(json.dumps({"format": "petal-apply-1", "network": "n", "method": "m"}))
    (place / "r.json").write_text(json.dumps({"format": "petal-apply-1", "network": "n", "method": "m"}))
    (place / "serve-demo").mkdir()
    (place / "serve-demo" / "audit.jsonl").write_text("")
    (place / "other").mkdir()
    (place / "other" / "config.json").write_text('{"model_type": "vit"}')
    (place / "work").mkdir()
    (place / "work" / "training.safetensors").write_bytes(b"")
    (place / "notes.json").write_text("[]")
    found = {one.path.name: (one.kind, one.state) for one in list_runs(place)}
    assert found == {
        "digits": ("run", "resumable"), "tune-digits.json": ("tune", "done"), "p.csv": ("apply", "done"),
        "q.csv": ("apply", "resumable"), "r.csv": ("apply", "broken"), "serve-demo": ("serve", "resumable"),
        "work": ("source", "resumable"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no folder"):
        list_runs(place / "nowhere")


def test_a_look_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """The lock that looking takes for a moment is waited for."""
    import fcntl
    import threading

    with alone(tmp_path):
        pass
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.02, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        with alone(tmp_path, "taken"):
            assert is_taken(tmp_path)


def test_the_table_keeps_names_whole(run: Path) -> None:
    from rich.console import Console

    console = Console(width=200, file=(run / "out.txt").open("w+"), force_terminal=False)
    console.print(table(list_runs(run.parent), run.parent))
    console.file.seek(0)
    text = console.file.read()
    assert "resumable" in text
    assert "41 of 60" in text
    assert "bn, tent" in text
