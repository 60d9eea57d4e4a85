"""`petal doctor`: what it finds out is so, and what is amiss is told and makes the exit code."""

import json
import platform
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from torch import nn
from typer.testing import CliRunner

import petal
from networks import network
from petal import doctor
from petal.cli import app
from petal.doctor import Examination

CPU = torch.device("cpu")


def examined(net: nn.Module | None = None, **options: Any) -> Examination:
    return doctor.examine(network() if net is None else net, (3, 8, 8), CPU, compiled=False, **options)


def problems(report: Examination) -> list[str]:
    return [found.text for found in report.findings if found.state == "problem"]


def test_a_sound_installation() -> None:
    report = examined()
    assert report.healthy, problems(report)
    assert report.versions["numpy"] == np.__version__
    assert report.versions["torch"] == torch.__version__
    assert report.machine["threads"] == torch.get_num_threads()
    assert report.machine["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert report.engine["runs"] == "engine"
    assert report.engine["compiled batches"] == []
    assert report.engine["layout"] == "channels last"
    assert report.test["close"]
    assert 0 <= report.test["difference"] <= report.test["limit"]
    assert report.test["checkpoint"]
    assert any("left out by --no-compile" in found.text for found in report.findings)


def test_what_the_engine_does_otherwise_is_told() -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    assert examined(grouped).engine["layout"] == "as it is (group norm)"
    double = examined(network().double())
    assert double.engine["runs"] == "eager: the engine is for float32, the network is in float64"
    assert any("a network in torch.float64 runs eager" in found.text for found in double.findings)


def test_a_network_that_cannot_be_run_is_a_problem() -> None:
    report = examined(nn.Sequential(nn.Flatten(), nn.Linear(7, 5)))
    assert not report.healthy
    assert "a step of this network fails here" in problems(report)[0]


def test_an_engine_that_answers_differently_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = doctor.accelerate

    def wrong(adapter: petal.Adapter, *arguments: Any) -> petal.Adapter:
        accelerate(adapter, *arguments)
        run = adapter.method.executor.run
        adapter.method.executor.run = lambda body, x: 2 * run(body, x)
        return adapter

    monkeypatch.setattr(doctor, "accelerate", wrong)
    assert problems(examined()) == ["engine and plain code answer differently: use --engine eager, and tell us"]


def test_a_checkpoint_that_does_not_come_back_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load", lambda adapter, path: None)
    assert problems(examined()) == ["a checkpoint does not give back the state that was saved"]


def packages(*requires: str) -> Examination:
    report = Examination()
    doctor.look_at_packages(report, requires)
    return report


def test_packages_that_are_missing_or_too_old() -> None:
    assert packages("numpy>=1.26").healthy
    assert problems(packages("numpy>=99")) == [f"numpy {np.__version__} is installed (arrays): pip install 'numpy>=99'"]
    missing = "no-such-package is missing (petal): pip install 'no-such-package>=1'"
    assert problems(packages("no-such-package>=1")) == [missing]
    optional = packages('ray-not-there; extra == "sweep"', 'no-such-package; extra == "dev"', "old; python_version < '3'")
    assert optional.healthy


def test_an_extra_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "kserve" else "9")
    report = packages('kserve<0.22,>=0.21; extra == "serve"')
    assert report.healthy
    assert any("kserve of the extra 'serve' is not installed: petal serve (pip install 'petal-tta[serve]')" in found.text
               for found in report.findings)  # fmt: skip


def test_what_is_missing_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    monkeypatch.setattr(doctor, "_memory", lambda: {"memory_gib": 2.0**31, "memory_available_gib": 2.0**29})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    report = Examination()
    doctor.look_at_machine(report, CPU)
    texts = " ".join(found.text for found in report.findings)
    for part in ("there is no C++ compiler", "less than 1 GiB", "torch is built without CUDA"):
        assert part in texts
    assert (report.machine["memory_gib"], report.machine["memory_available_gib"]) == (2.0, 0.5)
    assert report.healthy


def test_a_gpu_without_its_compiler_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_gpu", lambda number: {"name": "an old one", "capability": 6.1})
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    report = Examination()
    doctor.look_at_machine(report, CPU)
    assert problems(report) == ["triton is not installed: networks cannot be compiled for the GPU"]
    assert any("an old one is older than Volta" in found.text for found in report.findings)


@pytest.mark.parametrize("json_", [True, False])
def test_the_command(json_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["doctor", "--no-compile", "--network", "small", "--device", "cpu", "--input", "3,16,16", "--batch-size", "4"]
    done = CliRunner().invoke(app, [*options, *(["--json"] if json_ else [])])
    assert done.exit_code == 0, done.output
    if json_:
        found = json.loads(done.stdout)
        assert found["healthy"] is True
        assert found["versions"]["python"] == platform.python_version()
        assert "SmallNet" in found["engine"]["network"]
    else:
        assert "healthy" in done.stdout
        assert "engine, for small" in done.stdout
    monkeypatch.setattr(doctor, "load", lambda adapter, path: None)
    done = CliRunner().invoke(app, [*options, *(["--json"] if json_ else [])])
    assert done.exit_code == 1
    assert (json.loads(done.stdout)["healthy"] is False) if json_ else "not healthy" in done.stdout


def test_a_shape_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(app, ["doctor", "--input", "3,x"])
    assert isinstance(done.exception, petal.ConfigError)
    assert "--input is a shape" in str(done.exception)


def test_every_extra_for_users_is_known() -> None:
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named = {extra: {Requirement(line).name for line in lines} for extra, lines in extras.items()}
    assert {extra: set(names) for extra, names in doctor.EXTRAS.items()} == {
        extra: names for extra, names in named.items() if extra not in ("dev", "docs")
    }
    assert doctor.PURPOSES.keys() >= {name for names in doctor.EXTRAS.values() for name in names}
