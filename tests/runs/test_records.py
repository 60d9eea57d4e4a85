import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from petal import Adapter, Checkpoints
from petal.runs import Job, run_job
from petal.runs.records import Lines, complete_lines
from runs.parts import known, opened


@pytest.mark.parametrize("name", ["petal-none", "tent"])
def test_distance_is_over_all_parameters(name: str, source: Path, tmp_path: Path) -> None:
    """TENT adapts a few of them, and its distance is still that of the whole network."""
    o = opened(source)
    row = known()[name]
    records = run_job(Job(row), tmp_path, o)
    adapter = o.adapter(row, 0)
    for batch in o.stream(1):
        adapter(batch.x)
        break
    start = o.posterior.mean if name != "tent" else o.model.state_dict()
    squares = sum(float(((p.detach() - start[k]) ** 2).sum()) for k, p in adapter.model.named_parameters())
    count = sum(p.numel() for p in adapter.model.parameters())
    assert records[0]["distance"] == pytest.approx((squares / count) ** 0.5, rel=1e-4)
    assert (sum(p.numel() for p in adapter.adapted.values()) == count) == (name != "tent")


def test_records_are_on_the_disk_before_a_checkpoint_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the system only: after a power cut the records would end before the checkpoint."""
    o, fsync, save = opened(source), os.fsync, Checkpoints.save
    on_disk: dict[int, int] = {}
    positions: list[int] = []

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def saving(self: Checkpoints, adapter: Adapter, extra: dict[str, Any]) -> None:
        lines = self.folder / "records.jsonl"
        assert on_disk.get(lines.stat().st_ino) == lines.stat().st_size
        assert len(lines.read_bytes().splitlines()) == extra["position"]
        positions.append(extra["position"])
        save(self, adapter, extra)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Checkpoints, "save", saving)
    run_job(Job(known()["tent"]), tmp_path, o, checkpoint_every=7)
    assert positions == [7, 14, 21, 28]


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
