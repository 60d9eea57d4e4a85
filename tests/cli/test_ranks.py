"""`petal run` in several processes that share out the views."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.test_run import call, records
from petal import PetalError
from recipes.source import make_source

FEW = ["--images", "16", "--batch-size", "8", "--set", "petal.views=5", "--set", "petal.confidence=2", "-q"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_source(tmp_path_factory.mktemp("source"))
    return ["--weights", str(folder / "network.safetensors"), "--posterior", str(folder / "posterior.safetensors")]


def start(*command: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-m", *command], env=env, text=True, stderr=subprocess.PIPE)


def rank_of(launcher: int, rank: int) -> int:
    """Process id of a rank that a launcher started."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (place / "environ").read_bytes().split(b"\0"):
                return int(place.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def test_killed_rank_and_resume_with_another_number(source: list[str], tmp_path: Path) -> None:
    """A rank dies under torchrun: clear words and a checkpoint. `--gpus 3` goes on; the numbers are those of one process."""
    rest = ["digits", *FEW, *source, "--device", "cpu", "-m", "bn", "-m", "petal"]
    call(*rest, "--out", tmp_path / "alone")
    folder = tmp_path / "ranks"
    launcher = ["torch.distributed.run", "--monitor-interval", "5", "--nproc-per-node", "2"]  # it would end rank 0 at once
    process = start(*launcher, "-m", "petal", "run", *rest, "--out", str(folder))
    deadline = time.monotonic() + 120
    file = folder / "jobs" / "petal-o1-s0" / "records.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= 5:
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
            break
        time.sleep(0.01)
    said = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert "rank 0 of 2 has lost another rank" in said
    done = file.read_bytes().count(b"\n")
    assert 5 <= done < 30
    assert f"petal-o1-s0 stood at batch {done} of 30" in " ".join(said.split())
    assert len(list(folder.glob("jobs/petal-o1-s0/checkpoint-*.safetensors"))) == 1

    process = start("petal", "run", *rest, "--out", str(folder), "--gpus", "3")
    assert process.communicate(timeout=240)[1] == ""
    assert process.returncode == 0
    assert records(folder) == records(tmp_path / "alone")
    assert not list(folder.glob("jobs/*/*checkpoint*"))


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(PetalError, match="--gpus 4: there are 1 here"):
        call("digits", "--gpus", "4", "--out", tmp_path)
