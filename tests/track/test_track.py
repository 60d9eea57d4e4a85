"""Records in other tools, read back by those tools: every batch once, whatever happened in between."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import petal
from networks import images, network
from petal import ConfigError, PetalWarning, Record, Result
from petal.cli import app
from petal.runs import Tracking, read_records, run_job
from petal.track import TRACKERS
from petal.track.tracker import numbers
from recipes.source import make_source
from runs.parts import Stop, job, opened, stopping_at
from track import stores

READ: dict[str, Callable[[Path], dict[str, stores.Steps]]] = {name: getattr(stores, name) for name in TRACKERS}


@pytest.fixture(params=list(TRACKERS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip(TRACKERS[request.param].package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return request.param


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


def stream(count: int = 3, labels: bool = True) -> list[SimpleNamespace]:
    y = torch.arange(12) % 5
    return [SimpleNamespace(x=images(seed=n), **({"y": y} if labels else {})) for n in range(count)]


def folder_of(kind: str, folder: Path) -> Path:
    return folder / "tensorboard" if kind == "tensorboard" else folder


def check(steps: stores.Steps, records: list[dict]) -> None:
    """Each batch once, with the numbers of the record; the scores of the whole in the end."""
    assert sorted(step for step in steps if step >= 0) == [r["position"] for r in records]
    last = records[-1]["position"]
    for record in records:
        entries = [{k: v for k, v in e.items() if not k.startswith("mean/")} for e in steps[record["position"]]]
        entries = [e for e in entries if e]
        assert len(entries) == 1, record["position"]
        for name in ("error", "nll", "confidence", "forwards", "n"):
            assert entries[0][name] == pytest.approx(record[name], rel=1e-6), name
    ends = [e for step in (-1, last) for e in steps.get(step, []) if "mean/error" in e]
    n = sum(r["n"] for r in records)
    assert len(ends) == 1
    assert ends[0]["mean/error"] == pytest.approx(sum(r["error"] * r["n"] for r in records) / n, rel=1e-5)
    assert ends[0]["mean/n"] == n


def test_callbacks_are_told_each_record_and_the_result() -> None:
    told: list[object] = []

    class Mine:
        def on_record(self, record: Record) -> None:
            told.append(record)

        def on_end(self, result: Result) -> None:
            told.append(result)

    result = petal.evaluate(petal.Tent(network()), stream(), callbacks=[Mine(), Mine()])
    assert told == [r for record in result.records for r in (record, record)] + [result, result]


def test_an_evaluation(kind: str, tmp_path: Path) -> None:
    with TRACKERS[kind](tmp_path, "digits", "group/tent", {"lr": 0.5}) as tracker:
        result = petal.evaluate(petal.Tent(network()), stream(), callbacks=[tracker])
    (name, steps), = READ[kind](tmp_path).items()
    assert name == "digits/group/tent"
    check(steps, [r.to_json() for r in result.records])
    if kind != "tensorboard":
        assert float(steps[-2][0]["lr"]) == 0.5


def test_what_is_not_a_number_is_left_out() -> None:
    record = petal.evaluate(petal.Tent(network()), stream(1, labels=False)).records[0]
    values = numbers(record)
    assert math.isnan(record.error)
    assert {"error", "nll", "position", "domain", "calibration"}.isdisjoint(values)
    assert values["views_used"] == 0.0
    assert values["confidence"] == record.confidence


def test_an_interrupted_job_is_written_once_and_whole(kind: str, source: Path, tmp_path: Path) -> None:
    o, tracking = opened(source), Tracking((kind,), "mine")
    with pytest.raises(Stop):       # two batches after its last checkpoint
        run_job(job("tent"), tmp_path, o, checkpoint_every=4, progress=stopping_at(6), callbacks=tracking)
    records = run_job(job("tent"), tmp_path, o, checkpoint_every=4, callbacks=tracking)
    (name, steps), = READ[kind](folder_of(kind, tmp_path)).items()
    assert name == f"mine/{tmp_path.name}/tent-o1-s0"
    check(steps, records)
    assert "distance" in steps[3][0]
    run_job(job("tent"), tmp_path, o, callbacks=tracking)       # it is done
    check(READ[kind](folder_of(kind, tmp_path))[name], records)


def test_a_job_that_is_done_is_written_from_its_records(kind: str, source: Path, tmp_path: Path) -> None:
    o = opened(source)
    records = run_job(job("source"), tmp_path / "run", o)
    place = tmp_path / "elsewhere"
    assert run_job(job("source"), tmp_path / "run", o, callbacks=Tracking((kind, kind), folder=place)) == records
    (name, steps), = READ[kind](folder_of(kind, place)).items()
    assert name == "petal/run/source-o1-s0"
    check(steps, records)


def test_events_of_another_run_are_not_mixed_with_those_of_this_one(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    o, tracking = opened(source), Tracking(("tensorboard",), folder=tmp_path / "logs")
    run_job(job("source"), tmp_path / "a" / "run", o, callbacks=tracking)
    with pytest.raises(ConfigError, match="has events of another run"):
        run_job(job("source"), tmp_path / "b" / "run", o, callbacks=tracking)


def test_a_callback_that_fails_is_left_out(source: Path, tmp_path: Path) -> None:
    told = []

    class Broken:
        def on_record(self, record: Record) -> None:
            told.append(record.position)
            raise OSError("no network")

        def on_end(self, result: Result) -> None:
            told.append("end")

    with pytest.warns(PetalWarning, match="goes on without Broken, which failed: no network"):
        records = run_job(job("source"), tmp_path, opened(source), callbacks=lambda place, about: [Broken()])
    assert len(records) == 30
    assert told == [0]


def test_names_and_absent_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="track must be one of 'tensorboard', 'wandb', 'mlflow', got 'tensorbord'"):
        Tracking(("tensorbord",))
    for name, tracker in TRACKERS.items():
        monkeypatch.setitem(sys.modules, tracker.package, None)
        with pytest.raises(ConfigError, match=rf"needs {name}: pip install {name}, or 'petal-tta\[track\]'"):
            Tracking((name,))


def test_the_option_of_the_command(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    few = ["--images", "8", "--batch-size", "8", "-m", "source", "-m", "bn"]
    few += ["--weights", str(source / "network.safetensors")]
    command = ["digits", *few, "--out", str(tmp_path / "run"), "--track", "tensorboard"]
    for more in ([], ["--track-project", "mine", "--track-folder", str(tmp_path / "logs")]):
        result = CliRunner().invoke(app, ["run", *command, *more])
        assert result.exit_code == 0, (result.output, result.exception)
    for folder, project in ((tmp_path / "run", "petal"), (tmp_path / "logs", "mine")):
        found = stores.tensorboard(folder / "tensorboard")
        assert set(found) == {f"{project}/run/{job}" for job in ("source-o1-s0", "bn-o1-s0")}
        for name, steps in found.items():
            check(steps, read_records(tmp_path / "run" / "jobs" / name.rpartition("/")[2]))
    result = CliRunner().invoke(app, ["sweep", "digits", "--sequential", *few, "--out", str(tmp_path / "sweep"), "--track",
                                      "tensorboard", "--track-project", "s"])  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(stores.tensorboard(tmp_path / "sweep" / "digits" / "tensorboard")) == 2
    result = CliRunner().invoke(app, ["run", *command, "--track", "tensorbord"])
    assert isinstance(result.exception, ConfigError)


def test_the_key_of_a_job_stays_and_is_its_own(source: Path, tmp_path: Path) -> None:
    keys = []
    for folder in ("a", "b"):
        run_job(job("source"), tmp_path / folder, opened(source), callbacks=Tracking(()))
    tracking = Tracking(("tensorboard",)) if "tensorboard" in sys.modules else None
    if tracking is None:
        pytest.skip("tensorboard is not installed")
    for folder in ("a", "b", "a"):
        (tracker,) = tracking(tmp_path / folder / "jobs" / "source-o1-s0", {})
        keys.append(tracker.key)
    assert keys[0] == keys[2] != keys[1]
    assert json.loads((tmp_path / "a" / "jobs" / "source-o1-s0" / "track.json").read_text())["key"] == keys[0]
    assert len(read_records(tmp_path / "a" / "jobs" / "source-o1-s0")) == 30
