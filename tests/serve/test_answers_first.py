"""Answers do not wait for the learning; what goes wrong in it costs nobody an answer, and a lost device ends the server."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import petal
from networks import images, network
from petal.methods import Adapter
from petal.serve.queue import Closed
from petal.serve.worker import Worker
from serve.parts import WAIT, same, state, tent, until, worker

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Gate:
    """Lets learning wait until it is opened, and fail as told."""

    def __init__(self, adapter: Adapter, fails: BaseException | None = None) -> None:
        self.open, self.reached, self.fails = threading.Event(), threading.Event(), fails
        descent = adapter.descent
        assert descent is not None
        gradient = descent.gradient

        def waiting(*args: Any, **kwargs: Any) -> Tensor:
            self.reached.set()
            assert self.open.wait(WAIT)
            if self.fails is not None:
                fails, self.fails = self.fails, None
                raise fails
            return gradient(*args, **kwargs)

        descent.gradient = waiting              # type: ignore[method-assign]


def value(one: Worker, name: str, **labels: str) -> float | None:
    return one.watch.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def begun(tmp_path: Path) -> Any:
    started: list[tuple[Worker, Gate]] = []

    def begin(
        make: Callable[[], Adapter] = tent, fails: BaseException | None = None, **settings: Any
    ) -> tuple[Worker, Gate]:
        one = worker(tmp_path / str(len(started)), make, **settings)
        started.append((one, Gate(one.adapter, fails)))
        one.start()
        return started[-1]

    yield begin
    for one, gate in started:
        gate.open.set()
        one.close()
        one.join(WAIT)


def guarded() -> Adapter:
    return petal.Guard(petal.Ordered(petal.SmallBatch(tent(), memory=8, every=4, shuffled=True)))


@pytest.mark.parametrize("make", [tent, guarded])
def test_the_answer_is_there_while_learning_waits_and_the_next_one_is_by_what_was_learned(
    make: Callable[[], Adapter], begun: Any
) -> None:
    one, gate = begun(make)
    twin = make()
    seeds = range(1) if make is tent else range(2)          # the memory is full with the second batch
    for seed in seeds:
        expected = twin.predict(images(4, seed=seed))
        answer = one.submit(images(4, seed=seed)).result(WAIT)
        assert np.array_equal(answer.logits, expected.numpy()), "what predict gives at that point"
        twin(images(4, seed=seed))
    assert answer.adapted
    assert gate.reached.wait(WAIT)
    assert one.version == len(seeds), "its number is known, and nobody sees it before it is there"
    later = one.submit(images(4, seed=7))
    assert not later.done()
    gate.open.set()
    expected = twin(images(4, seed=7))
    assert np.array_equal(later.result(WAIT).logits, expected.numpy()), "after learning from all before it"
    one.act("checkpoint", "test").result(WAIT)
    assert same(state(one.adapter), state(twin))


def test_without_answer_first_the_answer_waits(begun: Any) -> None:
    one, gate = begun(answer_first=False)
    answer = one.submit(images(4))
    assert gate.reached.wait(WAIT)
    assert not answer.done()
    gate.open.set()
    assert answer.result(WAIT).adapted


def test_learning_that_fails_after_the_answer_is_counted_and_told_and_the_next_batch_learns(
    begun: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, gate = begun(fails=OSError("nothing is learned"))
    before, twin = state(one.adapter), tent()
    gate.open.set()
    assert one.submit(images(4, seed=0)).result(WAIT).label.shape == (4,)
    one.act("digest", "test").result(WAIT)
    assert same(state(one.adapter), before)
    assert value(one, "petal_unlearned_batches_total", reason="error") == 1
    assert value(one, "petal_failed_batches_total") == 0
    assert "answered and not learned from: nothing is learned" in caplog.text
    assert np.array_equal(one.submit(images(4, seed=1)).result(WAIT).logits, twin(images(4, seed=1)).numpy())
    one.act("digest", "test").result(WAIT)
    assert same(state(one.adapter), state(twin))


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_memory_that_runs_out_costs_a_step_and_no_answer(begun: Any) -> None:
    one, gate = begun(fails=torch.OutOfMemoryError(FULL))
    before = {key: value for key, value in state(one.adapter).items() if key != "skipped"}
    gate.open.set()
    answer = one.submit(images(4)).result(WAIT)
    assert np.array_equal(answer.logits, tent().predict(images(4)).numpy())
    one.act("digest", "test").result(WAIT)
    assert same({key: value for key, value in state(one.adapter).items() if key != "skipped"}, before)
    assert (value(one, "petal_out_of_memory_updates"), value(one, "petal_skipped_updates")) == (1, 1)
    assert one.submit(images(4)).result(WAIT).adapted


class HalfWay(torch.optim.SGD):
    """Runs out of memory with all weights moved, once."""

    left = 1

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        super().step(closure)
        if HalfWay.left and self.param_groups[0]["lr"] == 0.5:
            HalfWay.left -= 1
            raise torch.OutOfMemoryError(FULL)


def half_way() -> Adapter:
    return petal.Tent(network(), lr=0.5, optimizer=lambda parameters, lr: HalfWay(parameters, lr=lr))


@pytest.mark.parametrize("first", [True, False])
def test_weights_left_in_between_give_way_to_the_last_version_kept(first: bool, begun: Any) -> None:
    HalfWay.left = 1
    one, gate = begun(half_way, answer_first=first)
    gate.open.set()
    answer = one.submit(images(4))
    if first:
        assert answer.result(WAIT).adapted
    else:
        with pytest.raises(petal.OutOfMemory, match="while the weights were being changed"):
            answer.result(WAIT)
    assert one.act("digest", "test").result(WAIT)["version"] == 0
    assert np.array_equal(one.submit(images(4)).result(WAIT).logits, half_way().predict(images(4)).numpy())
    entry, = (e for e in one.audit.last(9) if e["action"] == "rollback")
    assert (entry["by"], entry["version"]) == ("server", 0)
    assert "memory ran out" in entry["reason"]


def test_a_lost_device_ends_the_worker_with_its_last_checkpoint(begun: Any, caplog: pytest.LogCaptureFixture) -> None:
    one, gate = begun()
    ended = threading.Event()
    one.ended = ended.set
    gate.open.set()
    one.submit(images(4, seed=0)).result(WAIT)
    one.act("checkpoint", "test").result(WAIT)
    kept = state(one.adapter)
    gate.open.clear()
    gate.reached.clear()
    gate.fails = RuntimeError("CUDA error: unspecified launch failure")
    answered = one.submit(images(4, seed=1))
    assert answered.result(WAIT).adapted, "it was out before"
    assert gate.reached.wait(WAIT)
    waiting, action = one.submit(images(4, seed=2)), one.act("digest", "test")
    gate.open.set()
    assert ended.wait(WAIT)
    one.join(WAIT)
    assert not one.is_alive()
    for future in (waiting, action):
        with pytest.raises(Closed):
            future.result(WAIT)
    with pytest.raises(Closed):
        one.submit(images(4))
    assert isinstance(one.lost, petal.DeviceLost)
    assert "cpu is lost (CUDA error: unspecified launch failure)" in caplog.text
    assert one.audit.last(1)[0]["action"] == "lost"
    again = worker(one.settings.folder)
    assert (again.resumed, again.version) == (True, 1)
    assert same(state(again.adapter), kept)


PLUGIN = """
import petal


class Dying(petal.Tent):
    def step(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().step(x)


petal.METHODS["dying"] = Dying
"""


def test_a_server_that_loses_its_device_says_so_and_ends(fresh_folder: Path) -> None:
    """Exit code 2, which a supervisor takes as a reason to start it again; it then goes on from its checkpoint."""
    from serve.running import Running

    plugin = fresh_folder / "dying.py"
    plugin.write_text(PLUGIN)
    settings = fresh_folder / "serve.toml"
    settings.write_text('name = "digits"\nrecipe = "digits"\nweights = "source/network.safetensors"\nmethod = "dying"\n'
                        'plugin = "dying.py"\ncheckpoint_seconds = 1000\n')  # fmt: skip
    x = np.random.default_rng(0).random((2, 3, 32, 32), np.float32)
    with Running(fresh_folder, [str(settings)], demo=False) as one:
        for _ in range(2):
            one.infer(x)
        one.ask("POST", "/api/checkpoint")
        status, headers, _ = one.request("POST", "/v2/models/digits/infer", json.dumps({"inputs": [
            {"name": "input", "shape": [2, 3, 32, 32], "datatype": "FP32", "data": x.reshape(-1).tolist()}]}))
        assert status == 503
        assert "retry-after" in headers
        assert one.process.wait(60) == 2
        text = one.log.read_text()
    assert "petal: cpu is lost (CUDA error: an illegal memory access was encountered)" in " ".join(text.split())
    until(lambda: (fresh_folder / "audit.jsonl").read_text().count('"lost"') == 1)
