"""History, audit log and versions by themselves."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from petal.serve.logs import Audit
from petal.serve.versions import NoVersion, Version, Versions
from petal.serve.watch import FIELDS, WINDOW, History, Metrics, Seen, Watch
from serve.parts import images, same, state, tent


def field(row: list[float | None], name: str) -> float | None:
    return row[FIELDS.index(name) + 1]


def test_history_has_a_row_a_second() -> None:
    history = History(seconds=5)
    history.add(now=100.2, samples=3, confidence=0.5)
    history.add(now=100.9, samples=4)
    history.add(now=103.1, samples=1, confidence=0.7)
    rows = history.since(0, now=104.0)
    assert [row[0] for row in rows] == [100, 101, 102, 103, 104]
    assert [field(row, "samples") for row in rows] == [7, 0, 0, 1, 0]
    assert [field(row, "confidence") for row in rows] == [0.5, 0.5, 0.5, 0.7, 0.7]
    assert [field(row, "distance") for row in rows] == [None] * 5
    assert [row[0] for row in history.since(103, now=104.0)] == [104]
    assert [row[0] for row in history.since(0, now=10_000)] == [9996, 9997, 9998, 9999, 10_000]


def test_numbers_that_json_cannot_hold_are_left_out() -> None:
    watch = Watch(Metrics(8, (("model", "m"),)))
    watch.signals({"entropy": math.nan, "distance": math.inf, "update": 1.0})
    one = Seen(np.zeros((3, 2, 2), np.float32), 1, 0.9, 2, 0.8, "4", 1.0)
    watch.compared([one, dataclasses.replace(one, source_label=1)], math.nan)
    assert json.loads(json.dumps(watch.now, allow_nan=False)) == {
        "guard": {"entropy": None, "distance": None, "update": 1.0}, "disagreement": 0.5, "distance": None,
    }  # fmt: skip


def test_means_are_over_about_a_hundred_samples() -> None:
    """A batch of n samples counts as n single ones."""
    whole, single = (Watch(Metrics(8, (("model", "m"),))) for _ in range(2))
    whole.predicted(0.5, 1.0, 10)
    whole.predicted(0.9, 2.0, 30)
    single.predicted(0.5, 1.0, 1)
    for _ in range(30):
        single.predicted(0.9, 2.0, 1)
    weight = (1 - 1 / WINDOW) ** 30
    assert whole.now["confidence"] == pytest.approx(weight * 0.5 + (1 - weight) * 0.9)
    assert single.now == pytest.approx(whole.now)


def test_the_audit_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for round_ in range(2):
        audit = Audit(path)
        for number in range(30):
            audit.write("freeze", "10.0.0.1", version=30 * round_ + number)
        assert [e["version"] for e in audit.last(3)] == [30 * round_ + n for n in (29, 28, 27)]
        audit.close()
    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == list(range(60))


def test_a_line_of_the_audit_log_is_on_the_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safe, fsync = list[int](), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        safe.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", noted)
    audit = Audit(tmp_path / "audit.jsonl")
    for number in range(3):
        audit.write("freeze", "10.0.0.1", version=number)
        assert safe[number:] == [(tmp_path / "audit.jsonl").stat().st_size]
    audit.close()


def test_a_full_disk_does_not_stop_an_action(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(Path("/dev/full"))            # takes no byte
    with caplog.at_level("INFO"):
        assert audit.write("freeze", "10.0.0.1", version=3)["version"] == 3
    audit.close()
    assert caplog.messages == ["/dev/full is not written: No space left on device", "audit: freeze"]


def test_versions_are_files_that_petal_can_load(tmp_path: Path) -> None:
    adapter, versions = tent(), Versions(tmp_path, keep=2)
    states = {}
    for number in range(1, 5):
        adapter(images(4, seed=number))
        versions.take(adapter, Version(number, 1.0 * number, "regular", 0.5, 0.1))
        states[number] = state(adapter)
    assert [v.number for v in versions.list()] == [0, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-3.safetensors", "version-4.safetensors"]
    versions.put_back(adapter, 3)
    assert same(state(adapter), states[3])
    again = Versions(tmp_path, keep=2)
    for left in (".tmpMJBEUN", ".version-5.safetensors.0123.tmp"):      # as a killed process leaves them
        (tmp_path / left).touch()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    again.read(adapter)
    assert same(state(adapter), states[3]), "reading changes nothing"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-3.safetensors", "version-4.safetensors"]
    assert torch.equal(torch.rand(3), expected), "nor what others draw"
    assert again.list()[1:] == versions.list()[1:]
    again.put_back(adapter, 4)
    assert same(state(adapter), states[4])
    with pytest.raises(NoVersion, match=r"version 1 is not kept \(there are: 0, 3, 4\)"):
        again.put_back(adapter, 1)
    assert same(state(adapter), states[4])


def test_a_damaged_version_is_refused_and_left_out(tmp_path: Path) -> None:
    adapter, versions = tent(), Versions(tmp_path, keep=2)
    adapter(images(4))
    versions.take(adapter, Version(1, 1.0, "regular"))
    file = tmp_path / "version-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    before = state(adapter)
    with pytest.raises(NoVersion, match=r"version 1 can no longer be read \(there are: 0\)"):
        versions.put_back(adapter, 1)
    assert same(state(adapter), before)
    assert 1 not in versions
    again = Versions(tmp_path, keep=2)
    again.read(adapter)
    assert [v.number for v in again.list()] == [0]
