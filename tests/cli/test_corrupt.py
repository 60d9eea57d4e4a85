import re
import shlex
from pathlib import Path

import numpy as np
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from petal import corruptions
from petal.cli.corrupt import corrupt
from petal.data import digits, open_dataset, streams
from petal.errors import ConfigError, DataError

app = typer.Typer()
app.command()(corrupt)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_all_fifteen_by_default(tmp_path):
    assert "wrote 15 files of 2 images a severity, cifar profile, seed 0" in succeed("digits", tmp_path, "--images", 2)
    assert sorted(open_dataset(tmp_path).corruptions) == sorted(corruptions.CORRUPTIONS)
    output = succeed("digits", tmp_path, "--images", 2, "--validation")
    assert "wrote 4 files" in output
    assert len(open_dataset(tmp_path).corruptions) == 19
    assert "wrote 0 files of 2 images a severity, cifar profile, seed 0; 15 were finished" in succeed(
        "digits", tmp_path, "--images", 2
    )


def test_options_reach_the_images(tmp_path):
    chosen = ("--corruption", "snow", "--corruption", "fog", "--severity", 4, "--seed", 5, "--images", 3)
    options = (*chosen, "--profile", "imagenet", "--batch-size", 2, "--device", "cpu")
    assert "wrote 2 files" in succeed("digits:train", tmp_path / "c", *options)
    read = open_dataset(tmp_path / "c")
    assert read.corruptions == ("fog", "snow")
    made = streams.continual(digits("train"), ["snow", "fog"], severity=4, images=3, seed=5, profile="imagenet")
    for a, b in zip(made, streams.continual(read, ["snow", "fog"], severity=4), strict=True):
        assert torch.equal(a.x, b.x)


def test_folders(tmp_path):
    for k, label in enumerate(("ant", "bee")):
        (tmp_path / "clean" / label).mkdir(parents=True)
        pixels = np.random.default_rng(k).integers(0, 256, (30 + k, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "clean" / label / "one.jpg")
    few = ("--corruption", "contrast", "--severity", 1, "--severity", 5)
    output = succeed(tmp_path / "clean", tmp_path / "c", "--size", 28, "--format", "jpg", *few)
    assert "wrote 2 folders of 2 images" in output
    found = sorted(str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*.jpg"))
    assert found == [f"contrast/{s}/{label}/one.jpg" for s in (1, 5) for label in ("ant", "bee")]
    assert open_dataset(tmp_path / "c").corrupted("contrast", 5).batch([0, 1])[0].shape == (2, 3, 28, 28)
    succeed(tmp_path / "clean", tmp_path / "n", "--size", 28, "--layout", "npy", *few)
    assert open_dataset(tmp_path / "n").corrupted("contrast", 5).batch([0, 1])[0].shape == (2, 3, 28, 28)


def test_quiet_and_overwrite(tmp_path):
    few = ("digits", tmp_path, "--images", 2, "--corruption", "fog", "--quiet")
    assert succeed(*few) == ""
    first = (tmp_path / "fog.npy").stat().st_mtime_ns
    assert succeed(*few) == ""
    assert (tmp_path / "fog.npy").stat().st_mtime_ns == first
    assert succeed(*few, "--overwrite") == ""
    assert (tmp_path / "fog.npy").stat().st_mtime_ns != first


def test_errors_are_petals(tmp_path, monkeypatch):
    (tmp_path / "clean" / "ant").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "clean" / "ant" / "one.png")
    for arguments, message in (
        (("nowhere", tmp_path / "c"), "nowhere: no such file or folder"),
        (("digits", tmp_path), "clean, which petal did not write"),
        (("digits", tmp_path / "c", "--corruption", "mist"), "unknown corruption 'mist'"),
        ((tmp_path / "clean", tmp_path / "clean" / "c"), "choose a folder outside"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, DataError), result.output
        assert message in str(result.exception)
    assert run("digits", tmp_path / "c", "--severity", 6).exit_code == 2
    assert run("digits", tmp_path / "c", "--layout", "zip").exit_code == 2
    assert not (tmp_path / "c").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(run("digits", tmp_path / "c", "--device", "cuda").exception, ConfigError)


def test_help_explains():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    for name in ("layout", "corruption", "validation", "severity", "profile", "size", "format", "seed", "images",
                 "batch-size", "device", "overwrite", "quiet"):
        assert f"--{name}" in result.output


def test_everything_the_page_on_data_shows_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands = [line for block in re.findall(r"```console\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(commands) >= 3
    for line in commands:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("petal", "corrupt")
        succeed(*arguments)
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 8
    exec(compile("\n".join(blocks), "docs/guides/data.md", "exec"), {})
