import errno
import json
import warnings
from pathlib import Path

import pytest

from petal.runs import (
    Job,
    run_job,
)
from petal.runs.records import Lines, complete_lines
from runs.parts import known, opened


def test_distance_is_over_all_parameters(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    row = known()["petal-none"]
    records = run_job(Job(row), tmp_path, o)
    adapter = o.adapter(row, 0)
    for batch in o.stream(1):
        adapter(batch.x)
        break
    start = o.posterior.mean
    squares = sum(float(((p.detach() - start[k]) ** 2).sum()) for k, p in adapter.model.named_parameters())
    count = sum(p.numel() for p in adapter.model.parameters())
    assert records[0]["distance"] == pytest.approx((squares / count) ** 0.5, rel=1e-4)


def test_lines_wait_for_room(tmp_path: Path) -> None:
    """A disk that takes a few bytes at a time, then none, then again: nothing is lost, torn or doubled."""
    lines = Lines(tmp_path / "r.jsonl")
    real, room = lines.file, 0

    class Disk:
        fileno = real.fileno

        def write(self, data: bytearray) -> int:
            nonlocal room
            if room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = min(room, len(data), 7)
            room -= count
            return real.write(bytes(data[:count]))

    lines.file = Disk()
    for number in range(10):
        room = (0, 0, 5, 1000, 11)[number % 5]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lines.add(json.dumps({"position": number}))
        assert bool(told) == bool(lines.waiting)
    room = 1000
    lines.sync()
    real.close()
    assert [r["position"] for r in complete_lines(tmp_path / "r.jsonl")[0]] == list(range(10))


def test_complete_lines_stop_at_the_first_that_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"position": 0}\n{"position": 1}\n{"position": 3}\n')
    assert complete_lines(path) == ([{"position": 0}, {"position": 1}], [16, 32])
    path.write_text('{"position": 0}\n{"position": 1}')
    assert complete_lines(path)[1] == [16]
    assert complete_lines(tmp_path / "none") == ([], [])
