"""What a checkpoint counts as done is on the disk before it, also if the power fails."""

import os
from pathlib import Path
from typing import Any

import pytest

from petal.checkpoint import Checkpoints
from runs.command import FEW, call, of


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses what was not synced: at each checkpoint, as many records are left as it says were done."""
    synced: dict[int, int] = {}                                      # bytes of each file that are safe
    fsync, save = os.fsync, Checkpoints.save
    left: list[tuple[int, int]] = []

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    def saved(self: Checkpoints, adapter: Any, extra: Any = None) -> None:
        path = self.folder / "records.jsonl"
        safe = path.read_bytes()[: synced.get(path.stat().st_ino, 0)]
        left.append((extra["position"], safe.count(b"\n")))
        save(self, adapter, extra)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Checkpoints, "save", saved)
    call("run", "digits", *FEW, *of(source), "-m", "tent", "--checkpoint-every", "4", "-q", "--out", tmp_path)
    assert [position for position, _ in left] == [4, 8, 12, 16, 20, 24, 28]
    assert [records for _, records in left] == [4, 8, 12, 16, 20, 24, 28]
    path = tmp_path / "jobs" / "tent-o1-s0" / "records.jsonl"
    assert synced[path.stat().st_ino] == path.stat().st_size         # and all of them once the job says it is done
