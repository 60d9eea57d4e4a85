"""The examples run as they stand; their files are what the commands take."""

import runpy
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import petal
from petal.cli import app

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, object]:
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def test_a_training_loop_ends_in_the_files_of_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = run("train_then_adapt.py", monkeypatch, "--epochs", 1)
    errors = [float(line.split("error ")[1].split("%")[0]) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert errors[1] < errors[0] < 95
    model = petal.models.build("small", 10, tmp_path / "source" / "network.safetensors")
    q = petal.load_posterior(tmp_path / "source" / "posterior.safetensors")
    assert q.mean.keys() == dict(model.named_parameters()).keys()
    commands = [line.strip() for line in str(scope["__doc__"]).splitlines() if line.strip().startswith("petal ")]
    for command in commands:
        few = ["--images", "8", "--batch-size", "8", "--set", "petal.views=2"]
        result = CliRunner().invoke(app, [*shlex.split(command)[1:], *few])
        assert result.exit_code == 0, (result.output, result.exception)
        assert "PETAL (FIM)" in result.output
    assert len(commands) == 1


def test_your_network_adapts_and_comes_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = run("adapt_your_network.py", monkeypatch, "--out", tmp_path / "out.safetensors")
    words = capsys.readouterr().out.split("error: ")[1].split("%")
    assert float(words[1].split()[-1]) < float(words[0]) - 20
    model = scope["Mine"]()
    model.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert (tmp_path / "out.state.safetensors").is_file()


def test_methods_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pd = pytest.importorskip("pandas")
    scope = run("compare_methods.py", monkeypatch, "--seeds", 1, "--out", tmp_path / "records.csv")
    frame, out = pd.read_csv(tmp_path / "records.csv"), capsys.readouterr().out
    assert set(frame.method) == set(scope["METHODS"])
    for name, group in frame.groupby("method"):
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        error = 100 * (group.error * group.n).sum() / group.n.sum()
        assert f"{error:.2f}" in line
        assert f"{group.forwards.mean():.1f}" in line
