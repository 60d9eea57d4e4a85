"""The options of `petal serve` reach the server; the server itself is tested in tests/serve."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import petal
from petal import models
from petal.cli.serve import demo_settings, serve
from petal.errors import ConfigError
from petal.serve import Settings, server
from petal.serve.model import build
from petal.serve.queue import Busy, RequestQueue
from petal.serve.watch import Metrics, Watch
from recipes.source import make_source

app = typer.Typer()
app.command()(serve)

OPTIONS: dict[str, tuple[list[str], Any]] = {
    "name": (["--name", "mine"], "mine"),
    "recipe": (["--recipe", "cifar10"], "cifar10"),
    "network": (["--network", "wrn-40-2"], "wrn-40-2"),
    "classes": (["--classes", "7"], 7),
    "input": (["--input", "3,8,8"], (3, 8, 8)),
    "labels": (["--labels", "cat, dog"], ("cat", "dog")),
    "weights": (["--weights", "w"], Path("w")),
    "posterior": (["--posterior", "q"], Path("q")),
    "statistics": (["--statistics", "s.safetensors"], Path("s.safetensors")),
    "method": (["--method", "tent"], "tent"),
    "fidelity": (["--fidelity", "paper"], "paper"),
    "set": (["--set", "tent.lr=1", "--set", "tent.steps=2"], ("tent.lr=1", "tent.steps=2")),
    "plugin": (["--plugin", "p.py"], Path("p.py")),
    "seed": (["--seed", "5"], 5),
    "guard": (["--guard", "freeze"], "freeze"),
    "guard_set": (["--guard-set", "window=9"], ("window=9",)),
    "small_batch": (["--small-batch"], True),
    "device": (["--device", "cpu"], "cpu"),
    "engine": (["--engine", "eager"], "eager"),
    "batch_size": (["--batch-size", "9"], 9),
    "delay_ms": (["--delay-ms", "3"], 3.0),
    "answer_first": (["--no-answer-first"], False),
    "queue": (["--queue", "77"], 77),
    "request_samples": (["--request-samples", "3"], 3),
    "max_body": (["--max-body", "9999"], 9999),
    "max_pixels": (["--max-pixels", "99"], 99),
    "resize": (["--no-resize"], False),
    "connections": (["--connections", "9"], 9),
    "read_seconds": (["--read-seconds", "2"], 2.0),
    "idle_seconds": (["--idle-seconds", "3"], 3.0),
    "answer_seconds": (["--answer-seconds", "4"], 4.0),
    "drain_seconds": (["--drain-seconds", "5"], 5.0),
    "host": (["--host", "0.0.0.0"], "0.0.0.0"),
    "http_port": (["--http-port", "1"], 1),
    "grpc": (["--no-grpc"], False),
    "grpc_port": (["--grpc-port", "2"], 2),
    "admin_host": (["--admin-host", "::1"], "::1"),
    "admin_port": (["--admin-port", "3"], 3),
    "token_file": (["--token-file", "t"], Path("t")),
    "folder": (["--folder", "f"], Path("f")),
    "checkpoint_seconds": (["--checkpoint-seconds", "6"], 6.0),
    "snapshot_every": (["--snapshot-every", "7"], 7),
    "snapshots": (["--snapshots", "8"], 8),
    "compare_seconds": (["--compare-seconds", "9"], 9.0),
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the server was run with."""
    found: list[Settings] = []
    monkeypatch.setattr(server, "run", lambda settings, device, started: found.append(settings))
    monkeypatch.setattr("petal.serve.logs.configure", lambda level: None)
    return found


def test_there_is_an_option_for_every_setting() -> None:
    assert {f.name for f in fields(Settings)} == {*OPTIONS, "meta", "source"}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_server_and_are_stronger_than_the_file(given: list[Settings], name: str, tmp_path: Path) -> None:
    arguments, expected = OPTIONS[name]
    assert getattr(Settings(), name) != expected or name == "device"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert getattr(given[0], name) == expected
    file = tmp_path / "serve.toml"
    file.write_text('name = "filed"\nbatch_size = 33\n')
    assert CliRunner().invoke(app, [str(file), *arguments]).exit_code == 0
    assert getattr(given[1], name) == expected
    assert given[1].batch_size == (33 if name != "batch_size" else 9)


def test_the_demo_needs_nothing_else(given: list[Settings], tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    result = CliRunner().invoke(app, ["--demo", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (settings,) = given
    assert (settings.name, settings.recipe, settings.labels) == ("digits", "digits", tuple("0123456789"))
    assert settings.weights == tmp_path / "source" / "network.safetensors"
    assert settings.posterior == tmp_path / "source" / "posterior.safetensors"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delitem(sys.modules, "petal.serve.server")
    monkeypatch.delattr("petal.serve.server")
    result = CliRunner().invoke(app, ["--demo"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'petal-tta[serve]'" in str(result.exception)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "say what to serve"),
        ({"network": "small"}, "give the weights"),
        ({"recipe": "digits", "method": "petall"}, "did you mean petal"),
        ({"recipe": "digits"}, "needs the source posterior"),
        ({"recipe": "digits", "method": "tent", "input": (3, 2)}, "cannot take samples"),
        ({"recipe": "digits", "method": "tent", "labels": ("a", "b")}, "2 labels for 10 classes"),
        ({"recipe": "digits", "method": "tent", "guard_set": ("a=1",)}, "guard_set without a guard"),
        ({"recipe": "digits", "method": "tent", "set": ("tent.lrr=1",)}, "tent"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said_at_the_start(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    if "recipe" in settings:
        settings = {**settings, "weights": make_source(tmp_path) / "network.safetensors"}
    with pytest.raises(ConfigError, match=match):
        server.run(Settings(folder=tmp_path, **settings), torch.device("cpu"))


def test_the_demo_takes_a_request_of_each_of_eight_clients() -> None:
    """Whoever waits for an answer sends nothing else: eight clients with an image each are never refused."""
    settings = demo_settings()
    queue = RequestQueue(settings, Watch(Metrics(settings.batch_size, (("model", "digits"),))))
    for _ in range(8):
        queue.check_room()
        queue.submit(torch.zeros(1, 3, 32, 32))
    with pytest.raises(Busy):
        queue.submit(torch.zeros(1, 3, 32, 32))


def test_a_source_folder_says_shape_and_labels(given: list[Settings], tmp_path: Path) -> None:
    model = models.build("small", 3, seed=0, width=8)
    petal.save_source(tmp_path / "s", model, "small", options={"width": 8}, input=(3, 16, 16), class_names=("a", "b", "c"))
    result = CliRunner().invoke(app, ["--source", str(tmp_path / "s"), "-m", "tent"])
    assert result.exit_code == 0, result.output
    assert (given[0].input, given[0].labels, given[0].source) == ((3, 16, 16), ("a", "b", "c"), tmp_path / "s")
    assert CliRunner().invoke(app, ["--source", str(tmp_path / "s"), "--labels", "x,y,z", "--input", "3,8,8"]).exit_code == 0
    assert (given[1].input, given[1].labels) == ((3, 8, 8), ("x", "y", "z"))
    (tmp_path / "serve.toml").write_text('source = "s"\nbatch_size = 9\n')
    assert CliRunner().invoke(app, [str(tmp_path / "serve.toml")]).exit_code == 0
    assert (given[2].input, given[2].batch_size) == ((3, 16, 16), 9)
    served = build(given[0], torch.device("cpu"))
    assert served.classes == 3
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(served.source(x), model.eval()(x))
    for more in (["--network", "wrn-40-2"], ["--weights", "w"], ["--demo"], ["--classes", "4"]):
        result = CliRunner().invoke(app, ["--source", str(tmp_path / "s"), *more])
        if result.exit_code == 0:
            with pytest.raises(ConfigError, match=r"leave one of them out|3 labels for 4"):
                build(given[-1], torch.device("cpu"))
        else:
            assert "--demo makes a source of its own" in str(result.exception)
