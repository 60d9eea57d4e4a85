"""`petal apply` and `petal runs` as commands."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import petal
from petal import models
from petal.cli import app


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apply")
    model = models.build("small", 3, seed=0, width=8)
    petal.save_source(folder / "source", model, "small", options={"width": 8}, class_names=("cat", "dog", "bee"))
    (folder / "images").mkdir()
    for number, image in enumerate(np.random.default_rng(0).integers(0, 256, (6, 40, 50, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
    return folder


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_folder_of_images(place: Path, tmp_path: Path) -> None:
    common = ["--batch-size", 3, "--device", "cpu", "--method", "tent"]
    first = call("apply", place / "source", place / "images", "--out", tmp_path / "a.csv", *common, "--stop-after", 1)
    assert (first.exit_code, "stopped: the same command goes on" in first.output) == (0, True)
    listed = call("runs", tmp_path)
    assert "resumable" in listed.output
    second = call("apply", place / "source", place / "images", "--out", tmp_path / "a.csv", *common)
    assert second.exit_code == 0, second.output
    assert "goes on at batch 1" in second.output
    assert "6 images: 6 adapted" in second.output
    assert f"wrote {tmp_path / 'a.csv'}" in second.output
    other = call("apply", "--source", place / "source", place / "images", "-o", tmp_path / "b.csv", *common, "-q")
    assert (other.exit_code, other.output) == (0, "")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert {line.split(",")[2] for line in (tmp_path / "a.csv").read_text().splitlines()[1:]} <= {"cat", "dog", "bee"}
    found = json.loads(call("runs", tmp_path, "--json").output)
    assert {(Path(one["path"]).name, one["kind"], one["state"]) for one in found} == {
        ("a.csv", "apply", "done"), ("b.csv", "apply", "done"),
    }  # fmt: skip


def test_exit_code_1_names_what_cannot_be_read(place: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for n in range(3):
        shutil.copy(place / "images" / f"{n}.png", tmp_path / "images")
    for n in range(12):
        (tmp_path / "images" / f"bad{n}.png").write_bytes(b"no image")
    (tmp_path / "images" / "notes.txt").write_text("")
    result = call("apply", "--source", place / "source", tmp_path / "images", "--out", tmp_path / "a.csv", "-m", "bn")
    assert result.exit_code == 1
    assert "cannot be read: bad0.png: truncated or not an image" in result.output
    assert "and 2 more, in" in result.output
    assert "left out, since they are no images: 1 (notes.txt)" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["images"], "give a network and an input"), (["a", "b", "c"], "give a network and an input"),
        (["smal", "images", "--classes", "3", "--weights", "w"], "no network 'smal'"),
        (["--source", "nowhere", "images"], "no source at nowhere"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(petal.PetalError, match=words):
        call("apply", *arguments, "--out", tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert "nothing in" in call("runs", tmp_path).output
    with pytest.raises(petal.ConfigError, match="no folder"):
        call("runs", tmp_path / "nowhere")
