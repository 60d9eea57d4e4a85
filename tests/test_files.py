"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from petal._files import replacing, write_tensors


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, old: str | None, error: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    if old is not None:
        path.write_text(old)

    def fail_halfway() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.exists() == (old is not None)
            raise error

    with pytest.raises(error):
        fail_halfway()
    assert os.listdir(tmp_path) == ([] if old is None else ["a.bin"])
    if old is not None:
        assert path.read_text() == old


def test_success_replaces_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path, "a rename between file systems is not atomic"
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_block_that_writes_nothing_fails_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_text("old")
    with pytest.raises(OSError), replacing(path):
        pass
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_missing_folder_and_folder_as_target(tmp_path: Path) -> None:
    with pytest.raises(OSError), replacing(tmp_path / "none" / "a") as temporary:
        temporary.write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "folder") as temporary:
        temporary.write_text("x")
    assert os.listdir(tmp_path) == ["folder"]


def test_usual_permissions_whatever_the_writer_made(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("x")
        temporary.chmod(0o600)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_relative_names_and_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with replacing("a.bin") as temporary:
        temporary.write_text("x")
    assert os.listdir() == ["a.bin"]


def test_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (events.append("sync"), fsync(f))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("x")
    assert events == ["sync", "replace", "sync"]


def test_the_same_tensors_and_texts_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.ones(3, dtype=torch.int64)}
    texts = {name: f"ä {name}" for name in "gfedcba"}
    for number in range(6):
        order = dict(sorted(texts.items(), reverse=bool(number % 2)))
        write_tensors(tmp_path / f"{number}", tensors, order)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "0", framework="pt") as file:
        assert file.metadata() == texts
        assert torch.equal(file.get_tensor("b"), tensors["b"])
        assert torch.equal(file.get_tensor("a"), tensors["a"])
