"""Adapting for ever takes no more memory than adapting for a while."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from long_run import live_tensors, make, stream
from petal import METHODS, iter_evaluate
from petal.checkpoint import Checkpoints
from tracked_memory import _Tracker


@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("method", [*METHODS, "petal+guard", "petal+small+guard"])
def test_no_tensor_is_left_behind(method: str, engine: str, tmp_path: Path) -> None:
    """Bytes in tensors, and their number, are the same to the last one after 24 steps and after 30."""
    kept = Checkpoints(tmp_path)
    with _Tracker() as tracker:
        adapter = make(method, engine)
        records = iter_evaluate(adapter, stream(1000))
        seen = []
        for count in (18, 6, 6):         # memories are full after the first; then as many of each batch size
            for _ in islice(records, count):
                pass
            kept.save(adapter)
            kept.wait()
            seen.append((live_tensors(), tracker.now))
    assert seen[1] == seen[2]
    assert method in ("source", "bn") or seen[0][1] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "engine"), [("petal", "eager"), ("petal", "auto"), ("tent", "auto"), ("petal+small+guard", "auto")]
)
def test_memory_over_twenty_thousand_steps(method: str, engine: str) -> None:
    command = [sys.executable, "-m", "long_run", method, engine, "20000"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    seen = json.loads(out.stdout)
    assert (seen[0]["step"], seen[-1]["step"]) == (2000, 20000)
    assert seen[-1]["rss"] < 1.01 * seen[0]["rss"], seen
    assert seen[-1]["tensors"] == seen[0]["tensors"]
