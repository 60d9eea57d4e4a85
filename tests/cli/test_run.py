import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from petal import METHODS, PetalError, load_posterior, models, save_source
from petal.cli.check import check
from petal.cli.run import run
from petal.runs import Experiment
from recipes.source import make_source

app = typer.Typer()
app.command()(run)
FEW = ["--images", "16", "--batch-size", "8", "--set", "petal.views=2", "--set", "petal.confidence=2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_source(tmp_path_factory.mktemp("source"))
    return ["--weights", str(folder / "network.safetensors"), "--posterior", str(folder / "posterior.safetensors")]


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def records(folder: Path) -> dict[str, list[dict[str, object]]]:
    out = {}
    for file in sorted(folder.glob("jobs/*/records.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        out[file.parent.name] = [{k: v for k, v in r.items() if k != "seconds"} for r in lines]
    return out


def test_a_run_and_more_of_it(source: list[str], tmp_path: Path) -> None:
    out = call("digits", *FEW, *source, "--out", tmp_path, "-m", "bn", "-m", "petal", "--seed", "0-1")
    assert "PETAL (FIM)" in out
    assert "BN Adapt" in out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [j["id"] for j in manifest["jobs"]] == ["bn-o1-s0", "petal-o1-s0", "petal-o1-s1"]
    assert manifest["jobs"][1]["options"]["views"] == 2
    assert len(manifest["weights"]["sha256"]) == 64
    first = records(tmp_path)
    assert {len(r) for r in first.values()} == {30}
    assert first["petal-o1-s0"] != first["petal-o1-s1"]
    out = call("digits", *FEW, *source, "--out", tmp_path, "-m", "petal", "-m", "source")
    assert "(was done)" in out
    again = records(tmp_path)
    assert {k: again[k] for k in first} == first
    assert "source-o1-s0" in again
    with pytest.raises(PetalError, match="severity was 5 and is 3"):
        call("digits", *FEW, *source, "--out", tmp_path, "-m", "petal", "--severity", "3")


def test_quiet_prints_nothing(source: list[str], tmp_path: Path) -> None:
    assert call("digits", *FEW, *source, "--out", tmp_path, "-m", "source", "--quiet") == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit"], "did you mean digits"),
        (["digits", "-m", "petals"], "did you mean petal"),
        (["digits", "--set", "petal.emma=1"], "did you mean ema"),
        (["digits", "--order", "x"], "--order takes numbers"),
        (["cifar10"], "needs images"),
        (["digits", "--data", "a", "--corrupted", "b"], "not both"),
        (["digits", "--plugin", "nowhere.py"], "no plugin at"),
        (["digits", "--corrupted", "digits"], "clean images"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(PetalError, match=words):
        call(*arguments, "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_without_meaning_are_found_before_anything_runs(source: list[str], tmp_path: Path) -> None:
    with pytest.raises(PetalError, match="gate must be one of"):
        call("digits", *source, "--out", tmp_path, "--set", "petal.gate=door")
    with pytest.raises(PetalError, match="--posterior"):
        call("digits", *source[:2], "--out", tmp_path, "-m", "bn", "-m", "petal")
    assert not (tmp_path / "manifest.json").exists()


def test_plugin(source: list[str], tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "my_method.py"
    assert len(example.read_text().splitlines()) < 50
    few = [*FEW[:4], *source, "--out", tmp_path]
    try:
        call("digits", *few, "--plugin", example, "-m", "tent", "-m", "mine", "--set", "mine.margin=2")
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["jobs"][1]["options"] == {"lr": 0.001, "margin": 2.0, "momentum": 0.9}
        assert manifest["plugin"]["path"].endswith("my_method.py")
        both = records(tmp_path)
        assert len(both["mine-o1-s0"]) == 30
        assert both["mine-o1-s0"][1]["nll"] != both["tent-o1-s0"][1]["nll"]
        assert both["mine-o1-s0"][-1]["distance"] > 0
    finally:
        METHODS.pop("mine", None)
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(PetalError, match="adds no method"):
        call("digits", *few, "--plugin", empty)
    empty.write_text("1 / 0\n")
    with pytest.raises(PetalError, match="ZeroDivisionError"):
        call("digits", *few, "--plugin", empty)


@pytest.mark.filterwarnings("default::petal.PetalWarning")
def test_the_example_of_a_forced_collapse(source: list[str], tmp_path: Path) -> None:
    """Nothing before the learning rate jumps, an alarm within 100 batches of it."""
    example = Path(__file__).parents[2] / "examples" / "runaway.py"
    settings = ["runaway.gate=batch", "runaway.views=1", "runaway.after=20", "guard.every=2", "guard.window=40"]
    chosen = [word for setting in settings for word in ("--set", setting)]
    try:
        out = call("digits", *FEW[:4], *source, "--out", tmp_path, "--plugin", example, "-m", "runaway+guard", *chosen)
    finally:
        METHODS.pop("runaway", None)
    alarms = [r["position"] for r in records(tmp_path)["runaway+guard-o1-s0"] if "alarm" in r["guard"]]
    assert 20 <= alarms[0] < 30
    assert "Runaway shows signs of a collapse after batch" in " ".join(out.split())


def test_a_recurring_run_in_pieces(source: list[str], tmp_path: Path) -> None:
    rest = ["digits", *FEW, *source, "-m", "tent+guard", "-m", "bn", "--visits", "2", "--set", "guard.every=5"]
    call(*rest, "--out", tmp_path / "whole")
    pieces = [call(*rest, "--out", tmp_path / "pieces", "--stop-after", "50") for _ in range(3)]
    assert "TENT-continual + guard" in pieces[0]
    assert "stopped at batch 50 of 60: the same command goes on" in pieces[0]
    assert "stopped at batch 40 of 60" in pieces[1]
    assert "(was done)" in pieces[2]
    assert "by visit" in pieces[2]
    assert records(tmp_path / "pieces") == records(tmp_path / "whole")
    call(*rest, "--out", tmp_path / "first", "--stop-after", "60")
    assert list(records(tmp_path / "first")) == ["tent+guard-o1-s0"]  # whole, and the next is not begun
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert (manifest["stream"], manifest["visits"]) == ("recurring", 2)
    assert manifest["jobs"][0]["options"]["guard"]["every"] == 5
    call("digits", *FEW, *source, "-m", "bn+small", "--label-correlation", "0.1", "--out", tmp_path / "runs")
    with pytest.raises(PetalError, match="visits was 2 and is None"):
        call("digits", *FEW, *source, "-m", "bn", "--out", tmp_path / "whole")


PROGRAM = """
import torch, typer
torch.set_num_threads(1)
from petal.cli.run import run
app = typer.Typer(); app.command()(run); app()
"""


def test_killed_run_gives_the_same_numbers(source: list[str], tmp_path: Path) -> None:
    """SIGKILL in the middle of the second method; the records are those of a run that was left alone."""
    rest = [*FEW, *source, "-m", "tent-online", "-m", "petal", "-q", "--checkpoint-every", "4"]
    call("digits", *rest, "--out", tmp_path / "alone")
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", PROGRAM, "digits", *rest, "--out", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if sum(file.read_bytes().count(b"\n") for file in folder.glob("jobs/*/records.jsonl")) >= 43:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output.decode()
    assert list(folder.glob("jobs/petal-o1-s0/checkpoint-*"))
    subprocess.run(command, env=env, check=True)
    assert records(folder) == records(tmp_path / "alone")
    assert not list(folder.glob("jobs/*/*checkpoint*"))


def test_a_plugin_that_adds_only_a_network(source: list[str], tmp_path: Path) -> None:
    plugin = tmp_path / "net.py"
    plugin.write_text(
        "from functools import partial\nimport petal\n"
        "petal.models.NETWORKS['narrow'] = partial(petal.models.SmallNet, width=8)\n"
    )
    try:
        call("digits", *FEW[:4], *source, "--network", "narrow", "--plugin", plugin, "-m", "bn", "--out", tmp_path / "run")
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert manifest["plugin"]["networks"] == "narrow"
        assert manifest["network"] == "narrow"
        with pytest.raises(PetalError, match="adds networks only"):
            check(plugin)
        models.NETWORKS.pop("narrow")
        assert Experiment("digits", plugin=str(plugin)).load_plugin()["networks"] == "narrow"      # run again: it was gone
        assert "narrow" in models.NETWORKS
        plugin.write_text("import petal\npetal.models.NETWORKS['narrow'] = 3\n")
        with pytest.raises(PetalError, match="is no function of `classes`"):
            call("digits", *FEW[:4], *source, "--plugin", plugin, "--out", tmp_path / "run")
    finally:
        models.NETWORKS.pop("narrow", None)


def test_a_source_folder(source: list[str], tmp_path: Path) -> None:
    """One option for network, posterior and statistics; the records are the same."""
    folder = tmp_path / "source"
    model = models.build("small", 10, source[1], width=8)
    save_source(folder, model, "small", classes=10, options={"width": 8}, posterior=load_posterior(source[3]))
    few = ["--images", "4", "--batch-size", "4"]
    call("digits", *few, *source, "-m", "petal", "--set", "petal.views=1", "--out", tmp_path / "a")
    call("digits", *few, "--source", folder, "-m", "petal", "--set", "petal.views=1", "--out", tmp_path / "b")

    assert records(tmp_path / "a") == records(tmp_path / "b")
    for more in (["--weights", source[1]], ["--network", "wrn-40-2"]):
        with pytest.raises(PetalError, match="leave one of them out"):
            call("digits", "--source", folder, *more, "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists()
