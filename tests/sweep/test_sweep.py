"""Sweeps of the digits recipe: on Ray with a worker killed on the way, and one after the other."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from cli.test_run import call as call_run
from cli.test_run import records
from petal import METHODS, PetalError
from petal.cli.report import report
from petal.cli.sweep import Board, sweep
from petal.runs import experiment
from petal.sweep import Outcome, Part, Resources, cluster, jobs, prepare
from recipes.source import make_source

SMALL = ["--images", "16", "--batch-size", "8", "--checkpoint-every", "4"]
SETTINGS = [f"--set={method}.{option}" for method in ("cotta", "petal") for option in ("views=2", "confidence=2")]
BATCHES = 30            # 15 corruptions, two batches each
GRID = ["-m", "cotta", "-m", "petal", "--order", "1-2", "--seed", "0-1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_source(tmp_path_factory.mktemp("source"))
    return ["--weights", str(folder / "network.safetensors"), "--posterior", str(folder / "posterior.safetensors")]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with cluster.connected(Resources(address="local", local_cpus=2)) as ray:
        yield ray


def call(*arguments: object, command: Any = sweep) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


class Killer(threading.Thread):
    """Waits until some job has a checkpoint on the disk, keeps its records and kills the process that writes them.

    Records are written at once and checkpoints by a thread, later: lines alone do not say that one is there. The process is
    held while it is looked at, so that it is killed where it was seen.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.killed, self.lines = folder, "", [""]

    def run(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for file in self.folder.glob("digits/jobs/*/records.jsonl"):
                if self.checkpointed(file):
                    for writer in pids_with(file):
                        os.kill(writer, signal.SIGSTOP)
                        lines = file.read_text().splitlines()
                        if writer in pids_with(file) and self.checkpointed(file) and len(lines) < BATCHES:
                            self.killed, self.lines = file.parent.name, lines
                            os.kill(writer, signal.SIGKILL)
                            return
                        os.kill(writer, signal.SIGCONT)
            time.sleep(0.005)

    def checkpointed(self, file: Path) -> bool:
        return any(file.parent.glob("checkpoint-*.safetensors"))


def pids_with(file: Path) -> list[int]:
    """The processes that have a file open."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == str(file) for link in (place / "fd").iterdir()):
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_sweep_on_ray_with_a_killed_worker(ray: Any, source: list[str], tmp_path: Path) -> None:
    """2 methods x 2 orders x 2 seeds: all finish, the numbers are those of runs done singly, and once is enough."""
    rest = [*SMALL, *SETTINGS, *GRID, *source]
    call_run("digits", *rest, "--out", tmp_path / "single", "-q")
    folder = tmp_path / "sweep"
    killer = Killer(folder)
    killer.start()
    said = call("digits", *rest, "--out", folder)
    killer.join()
    assert killer.killed
    assert "8/8 digits/" in said
    run = folder / "digits"
    found = records(run)
    assert len(found) == 8
    assert found == records(tmp_path / "single")
    assert not list(run.glob("jobs/*/*checkpoint*"))
    now = (run / "jobs" / killer.killed / "records.jsonl").read_text().splitlines()
    assert len(now) == BATCHES
    assert now[:4] == killer.lines[:4]  # with their times: what the first checkpoint covers was not done again
    assert now[-1] not in killer.lines

    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert "All 8 runs are done" in call("digits", *rest, "--out", folder)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before

    data = json.loads(call(folder, "-f", "json", command=report))
    rows = [row for section in data["sections"] for row in section["rows"]]
    assert [row["row"] for row in rows] == ["cotta", "petal"]
    for row in rows:
        errors = [np.mean([r["error"] for r in jobs]) for job, jobs in found.items() if job.startswith(f"{row['row']}-o")]
        assert len(errors) == 4
        assert row["mean"]["error"]["mean"] == pytest.approx(np.mean(errors))
        assert row["mean"]["error"]["std"] == pytest.approx(np.std(errors, ddof=1))
    assert "4 runs (2 orders, 2 seeds)" in call(folder, command=report)


PLUGIN = """
import os, petal
from pathlib import Path
HERE = Path(__file__).parent

class Once(petal.Source):
    def step(self, x):
        if not (HERE / "failed-once").exists():
            (HERE / "failed-once").write_text("")
            raise MemoryError("no memory just now")
        return super().step(x)

class Always(petal.Source):
    def step(self, x):
        with (HERE / "tries").open("a") as file:
            file.write("x")
        raise MemoryError("never enough memory")

petal.METHODS["once"] = Once
petal.METHODS["always"] = Always
"""


def test_failed_runs_are_tried_again_and_told(ray: Any, source: list[str], tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    rest = ["digits", *SMALL, *source, "--plugin", plugin, "-m", "once", "-m", "always", "-m", "bn", "--out", tmp_path / "s"]
    try:
        with pytest.raises(PetalError, match=r"1 of 3 runs failed(.|\n)*digits/always-o1-s0(.|\n)*never enough memory"):
            call(*rest, "--retries", "1")
        assert (tmp_path / "tries").read_text() == "xx"
        assert len(records(tmp_path / "s" / "digits")["once-o1-s0"]) == 30
        with pytest.raises(PetalError, match="1 of 3 runs failed"):
            call(*rest, "--retries", "0")
        assert (tmp_path / "tries").read_text() == "xxx"
        with pytest.raises(PetalError, match=r"1 of 4 runs failed(.|\n)*never enough memory"):
            call(*rest, "-m", "source", "--sequential")
        assert len(records(tmp_path / "s" / "digits")["source-o1-s0"]) == 30
        done = ["digits", *SMALL, *source, "--plugin", plugin, "-m", "once", "-m", "bn", "--out", tmp_path / "s"]
        assert "All 2 runs are done" in call(*done)
        plugin.write_text(PLUGIN + "# other code")
        with pytest.raises(PetalError, match=r"plugin was .* and is"):
            call(*done, "--sequential")
    finally:
        METHODS.pop("once", None)
        METHODS.pop("always", None)


def test_without_ray(source: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to get it; one after the other it goes without, and settings with several values are rows of their own."""
    monkeypatch.setitem(sys.modules, "ray", None)
    rest = ["digits", "--images", "8", "--batch-size", "8", *source, "--out", tmp_path / "s"]
    with pytest.raises(PetalError, match=r"pip install 'petal-tta\[sweep\]', or give --sequential"):
        call(*rest, "-m", "bn")
    assert not (tmp_path / "s").exists()
    grid = ["-m", "bn", "-m", "tent", "--set", "tent.lr=0.001,0.01"]
    said = call(*rest, *grid, "--sequential")
    assert "3/3 digits/tent,lr=0.01-o1-s0" in said
    assert "TENT-continual [lr=0.01]" in said
    one = ["digits", "--images", "8", "--batch-size", "8", *source, "-m", "tent", "--set", "tent.lr=0.01", "-q"]
    call_run(*one, "--out", tmp_path / "single")
    expected = [{**r, "row": "tent,lr=0.01"} for r in records(tmp_path / "single")["tent-o1-s0"]]
    assert records(tmp_path / "s" / "digits")["tent,lr=0.01-o1-s0"] == expected
    assert call(*rest, *grid, "--sequential", "-q") == ""
    with pytest.raises(PetalError, match="severity was 5 and is 3"):
        call(*rest, *grid, "--sequential", "--severity", "3")
    with pytest.raises(PetalError, match="is the folder of a sweep"):
        call_run(*one, "--out", tmp_path / "s")
    with pytest.raises(PetalError, match="is the folder of a run"):
        call(*one, "--out", tmp_path / "single", "--sequential")
    (tmp_path / "s" / "sweep.json").write_text("{}")
    with pytest.raises(PetalError, match=r"sweep\.json is not that of a sweep"):
        call(*rest, *grid, "--sequential")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "-m", "petals"], "did you mean petal"),
        (["digits", "--set", "petal.ema=0.9,x"], "ema takes float, got 'x'"),
        (["digits", "--device", "cpu", "--gpus", "0.5"], "exclude each other"),
        (["digits", "--device", "cuda", "--gpus", "0"], "for example 0.25"),
        (["digits", "--device", "cuda:1"], "Ray deals out the GPUs"),
        (["digits", "--weights", "a", "--weights", "b"], "for all recipes twice"),
        (["digits", "-m", "bn", "--sequential", "--retries", "1", "--address", "auto"], "--address, --retries is for Ray"),
        (["digits", "cifar10", "--weights", "digits=a", "--sequential", "-m", "bn"], "digits: .*no .* at a"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(PetalError, match=words):
        call(*arguments, "--out", tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--images", "10000"], "asked for 10000 images"), (["--label-correlation", "-1"], "above 0; got -1")],
)
def test_a_stream_that_cannot_be_made_leaves_no_folder(
    source: list[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Else the folder would refuse the command without the mistake."""
    rest = ["digits", "-m", "bn", *source, *arguments, "--out", tmp_path / "s"]
    with pytest.raises(PetalError, match=words):
        call(*rest, "--sequential")
    with pytest.raises(PetalError, match=words):
        call_run(*rest)
    assert not (tmp_path / "s").exists()


def test_the_source_is_trained_as_petal_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread: sums over several are rounded otherwise, and give another network."""
    threads: list[int] = []

    def make(*_: object) -> tuple[Path, Path]:
        threads.append(torch.get_num_threads())
        raise PetalError("enough")

    monkeypatch.setattr(experiment, "make_source", make)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert prepare(Part(experiment.Experiment("digits"), (), tmp_path)).failed == "enough"
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_a_sweep_of_an_older_version_is_known_again(tmp_path: Path) -> None:
    """Its sweep.json lacks what could not be set then, which has its default."""
    one = experiment.Experiment("digits", severity=3)
    new = ("stream", "stream_seed", "shuffle", "classes", "input")
    older = {key: value for key, value in asdict(one).items() if key not in new}
    assert jobs._same(older, one)
    assert not jobs._same({**older, "severity": 4}, one)
    assert not jobs._same(older, replace(one, stream_seed=1))
    assert not jobs._same(None, one)


class FakeRay:
    """Writes down how it is started."""

    def __init__(self, cpus: float = 4, gpus: float = 1) -> None:
        self.asked: dict[str, object] = {}
        self.ended = False
        self.machine = {"CPU": cpus, "GPU": gpus}

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: object) -> None:
        self.asked = options

    def shutdown(self) -> None:
        self.ended = True

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": self.machine}]


def test_which_ray_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake = FakeRay()
    monkeypatch.setattr(cluster, "import_ray", lambda: fake)
    reached: list[object] = []
    monkeypatch.setattr("socket.create_connection", lambda place, timeout: reached.append(place) or socket.socket())
    with cluster.connected(Resources(local_cpus=3)):
        assert (fake.asked["address"], fake.asked["num_cpus"], fake.ended) == ("local", 3, False)
    assert fake.ended
    with cluster.connected(Resources(address="ray://head:10001", local_cpus=3)):
        assert fake.asked["address"] == "ray://head:10001"
        assert "num_cpus" not in fake.asked
    assert reached == [("head", 10001)]
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with cluster.connected(Resources()):
        assert fake.asked["address"] == "head:6379"
    for resources, words in ((Resources(gpus=2), "2 GPUs; the largest .* has 1"), (Resources(cpus=8), "8 CPUs")):
        with pytest.raises(PetalError, match=words), cluster.connected(resources):
            pass
    fake.init = lambda **_: (_ for _ in ()).throw(ConnectionError("nobody"))  # type: ignore[method-assign]
    with pytest.raises(PetalError, match="no Ray at head:6379: nobody"), cluster.connected(Resources()):
        pass


@pytest.mark.parametrize(("address", "slow", "starts"), [("local", 1, True), ("local", 2, False), ("auto", 1, False)])
def test_a_ray_of_our_own_may_start_slowly_once(
    monkeypatch: pytest.MonkeyPatch, address: str, slow: int, starts: bool
) -> None:
    class Slow(FakeRay):
        tries = 0

        def init(self, **options: object) -> None:
            self.tries += 1
            if self.tries <= slow:
                raise Exception("timed out")
            super().init(**options)

    monkeypatch.setattr(cluster, "import_ray", Slow)
    refused = nullcontext() if starts else pytest.raises(PetalError, match="timed out")
    with refused, cluster.connected(Resources(address=address)) as fake:
        assert fake.tries == slow + 1


def test_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "import_ray", FakeRay)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(PetalError, match=f"no Ray at {address}: .*refused"), cluster.connected(Resources(address=address)):
        pass


def test_what_each_job_asks_for() -> None:
    asked: dict[str, object] = {}

    def remote(**options: object) -> Any:
        asked.update(options)
        return lambda function: SimpleNamespace(remote=lambda argument: argument)

    fake = SimpleNamespace(remote=remote, wait=lambda pending, timeout: (pending, []), get=lambda reference: reference)
    ticks: list[int] = []
    found = list(cluster._scattered(fake, len, {"a": "b"}, Resources(2, 0.25, 5), lambda: ticks.append(1)))
    assert found == [("a", "b")]
    assert asked == {"num_cpus": 2, "num_gpus": 0.25, "max_retries": 5, "retry_exceptions": True}
    assert ticks


def test_all_runs_are_on_the_board(tmp_path: Path) -> None:
    """Bars of the runs that have begun, counted from their records; those that are over have gone to the lines above."""
    tasks = [SimpleNamespace(name=name, place=tmp_path / name) for name in ("a", "b", "c")]
    for task, lines in zip(tasks, (3, 1, 0), strict=True):
        task.place.mkdir()
        text = "".join(json.dumps({"position": n, "error": 0.5, "n": 4}) + "\n" for n in range(lines))
        (task.place / "records.jsonl").write_text(text)
    console = Console(record=True, width=120)
    board = Board(console, False, tasks, {"a": 4, "b": 4, "c": 4}, already=2)  # type: ignore[arg-type]
    board.tick()
    shown = {task.description: (task.completed, task.visible) for task in board.progress.tasks}
    assert shown == {
        "all runs: 0 of 3 done": (4, True), "a: 50.00 % so far": (3, True), "b: 50.00 % so far": (1, True),
        "c: 0.00 % so far": (0, False),
    }  # fmt: skip
    board.show([Outcome("a", {"error": 0.25}, warnings=("odd pixels in [/x]",)), Outcome("b", failed="no memory in [/y]")])
    assert [outcome.name for outcome in board.failed] == ["b"]
    assert not any(task.visible for task in board.progress.tasks[1:])
    said = console.export_text()
    assert "3/5 a" in said
    assert "error  25.00 %" in said
    assert "odd pixels in [/x]" in said
    assert "failed: no memory in [/y]" in said
