"""A checkpoint that could not be written is told, and tried again by itself until it can."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from networks import images
from serve.parts import WAIT, settle, until, worker


class Disk:
    """Takes checkpoints unless it is full."""

    def __init__(self) -> None:
        self.full, self.replace = False, os.replace

    def __call__(self, source: Any, target: Any) -> None:
        if self.full and Path(target).name.startswith("checkpoint-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.replace(source, target)


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_an_idle_server_tries_again_until_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    monkeypatch.setattr(os, "replace", disk)
    one = worker(tmp_path, checkpoint_seconds=0.1)
    failures = one.watch.metrics.checkpoint_failures._value
    disk.full = True
    one.start()
    settle([one.submit(images(4))])
    assert one.act("checkpoint", "test").result(WAIT) == {"action": "checkpoint", "version": 1, "written": False}
    before = failures.get()
    until(lambda: failures.get() > before + 2)                       # though nobody asks for anything
    assert one.checkpoints.latest() is None
    disk.full = False
    until(lambda: one.checkpoints.latest() is not None)
    assert one.act("checkpoint", "test").result(WAIT)["written"] is True
    assert worker(tmp_path).version == 1
    one.close()
    one.join(WAIT)
