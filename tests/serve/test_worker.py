"""The worker by itself: batches, order, versions, actions, checkpoints."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal.checkpoint import CheckpointError, Checkpoints, digest
from petal.errors import InputError
from petal.guard import Alarm
from petal.order import Keys
from petal.serve.queue import ADAPT, PREDICT, SOURCE, Busy, Closed
from petal.serve.replies import Unanswered
from petal.serve.versions import NoVersion
from petal.serve.worker import Worker
from serve.parts import WAIT, Echo, same, sample, settle, state, tent, until, worker


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Worker]:
    one = worker(tmp_path, Echo)
    yield one
    one.close()


def test_every_answer_reaches_its_own_request_from_many_threads(echo: Worker) -> None:
    echo.settings = type(echo.settings)(input=(3, 8, 8), batch_size=12, delay_ms=1.0, queue=10_000)
    echo.start()
    wrong: list[float] = []

    def client(number: int) -> None:
        for turn in range(40):
            value = 0.001 * (40 * number + turn) + 0.6
            target = (ADAPT, PREDICT)[turn % 2]
            x = sample(value, 1 + turn % 3)
            answer = echo.submit(x, target).result(WAIT)
            if not np.array_equal(answer.logits, x[:, 0, 0, :5].numpy()):
                wrong.append(value)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert max(len(batch) for batch in echo.adapter.batches) > 3, "nothing was gathered"


def test_batches_keep_the_order_of_arrival_and_their_size(echo: Worker) -> None:
    values = [round(0.6 + 0.01 * i, 4) for i in range(9)]
    echo.settings = type(echo.settings)(input=(3, 8, 8), batch_size=10, delay_ms=0.0, queue=100)
    futures = []
    for i, value in enumerate(values):          # before the thread runs: all wait
        futures.append(echo.submit(sample(value, 3), ADAPT))
        if i == 4:
            futures.append(echo.submit(sample(0.9), SOURCE))
    echo.start()
    settle(futures)
    seen = [v for batch in echo.adapter.batches for v in batch]
    assert np.allclose(seen, np.repeat(values, 3))
    assert [len(batch) for batch in echo.adapter.batches] == [9, 9, 9]


def test_small_requests_never_overtake_a_large_one(echo: Worker) -> None:
    echo.settings = type(echo.settings)(input=(3, 8, 8), batch_size=10, delay_ms=0.0, queue=100)
    futures = [echo.submit(sample(value, count)) for value, count in ((0.6, 6), (0.7, 8), (0.8, 2), (0.9, 3))]
    echo.start()
    settle(futures)
    assert [sorted({round(v, 2) for v in batch}) for batch in echo.adapter.batches] == [[0.6], [0.7, 0.8], [0.9]]


def test_a_batch_waits_for_others_as_long_as_it_is_told(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo, delay_ms=60_000.0, batch_size=4)
    one.start()
    first = one.submit(sample(0.6, 2))
    assert not first.done()
    second = one.submit(sample(0.7, 2))           # fills the batch: nobody waits for a minute
    settle([first, second])
    assert [len(batch) for batch in one.adapter.batches] == [4]
    third = one.submit(sample(0.8))
    one.close()                                   # nor does the end
    settle([third])
    one.join(WAIT)


def test_a_refused_sample_spoils_no_other_in_its_batch(echo: Worker) -> None:
    futures = [echo.submit(sample(value)) for value in (0.6, 0.5, 0.7)]
    echo.start()
    assert np.array_equal(futures[0].result(WAIT).logits, sample(0.6)[:, 0, 0, :5].numpy())
    with pytest.raises(InputError, match="not liked"):
        futures[1].result(WAIT)
    assert np.array_equal(futures[2].result(WAIT).logits, sample(0.7)[:, 0, 0, :5].numpy())


def test_a_batch_that_breaks_is_told_and_the_next_is_served(echo: Worker) -> None:
    echo.start()
    with pytest.raises(RuntimeError, match="one quarter"):
        echo.submit(sample(0.25)).result(WAIT)
    assert echo.submit(sample(0.6)).result(WAIT).version == "0"
    assert echo.watch.metrics.failed._value.get() == 1


def test_a_full_queue_is_busy_and_says_for_how_long(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo, queue=5)
    one.submit(sample(0.6, 12))                   # an empty queue takes any request
    with pytest.raises(Busy):
        one.check_room()
    with pytest.raises(Busy, match="queue is full") as error:
        one.submit(sample(0.6))
    assert error.value.retry_after >= 1
    one._rate = 2.0
    assert one.retry_after() == 6
    one.start()
    until(lambda: one.waiting == 0)
    assert one.submit(sample(0.6)).result(WAIT)


def test_answers_are_the_networks_own(tmp_path: Path) -> None:
    """Adapted, predicted and source answers against the same calls made directly."""
    one = worker(tmp_path)
    one.start()
    twin, x = tent(), images(6)
    for _ in range(3):
        expected = twin(x)
        got = one.submit(x, ADAPT).result(WAIT)
        assert np.allclose(got.logits, expected.numpy(), atol=1e-6)
        assert got.adapted
    got = one.submit(x, PREDICT).result(WAIT)
    expected = twin.predict(x)
    assert np.allclose(got.logits, expected.numpy(), atol=1e-6)
    assert (got.version, got.adapted) == ("3", False)
    p = np.exp(got.logits - got.logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert np.allclose(got.probabilities, p, atol=1e-6)
    assert np.allclose(got.entropy, -(p * np.log(p)).sum(1), atol=1e-5)
    assert np.array_equal(got.label, p.argmax(1))
    source = one.submit(x, SOURCE).result(WAIT)
    with torch.no_grad():
        assert np.allclose(source.logits, network()(x).numpy(), atol=1e-6)
    assert source.version == "source"


def test_versions_name_the_weights_that_answered(tmp_path: Path) -> None:
    """The answer to an adapting request comes from the weights before its own step."""
    one = worker(tmp_path)
    one.start()
    assert [one.submit(images(4)).result(WAIT).version for _ in range(3)] == ["0", "1", "2"]
    assert one.submit(images(4), PREDICT).result(WAIT).version == "3"


def test_predictions_and_the_source_change_nothing(tmp_path: Path) -> None:
    one = worker(tmp_path)
    one.start()
    settle([one.submit(images(4))])
    before = one.act("digest", "test").result(WAIT)
    settle([one.submit(images(4, seed=3), target) for target in (PREDICT, SOURCE, "0")])
    assert one.act("digest", "test").result(WAIT) == before
    settle([one.submit(images(4))])
    assert one.act("digest", "test").result(WAIT) != before


def test_freeze_stops_adaptation_and_thaw_lets_it_go_on(tmp_path: Path) -> None:
    one = worker(tmp_path)
    one.start()
    settle([one.submit(images(4))])
    one.act("freeze", "test").result(WAIT)
    before = one.act("digest", "test").result(WAIT)
    answer = one.submit(images(4)).result(WAIT)
    assert (answer.adapted, answer.version) == (False, "1")
    assert one.act("digest", "test").result(WAIT) == before
    one.act("thaw", "test").result(WAIT)
    assert one.submit(images(4)).result(WAIT).adapted
    assert one.act("digest", "test").result(WAIT)["version"] == 2


def test_roll_back_is_exact_and_version_numbers_are_never_used_twice(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshot_every=2, snapshots=3)
    one.start()
    digests = {0: one.act("digest", "test").result(WAIT)["sha256"]}
    for number in range(1, 6):
        settle([one.submit(images(4, seed=number))])
        digests[number] = one.act("digest", "test").result(WAIT)["sha256"]
    assert [v.number for v in one.versions.list()] == [0, 2, 4]
    done = one.act("rollback", "test", version=2).result(WAIT)
    assert (done["version"], done["before"]) == (2, 5)
    assert one.act("digest", "test").result(WAIT) == {"version": 2, "sha256": digests[2]}
    assert [v.number for v in one.versions.list()] == [0, 2, 4, 5], "what was rolled back is kept"
    settle([one.submit(images(4))])
    assert one.version == 6
    one.act("rollback", "test").result(WAIT)
    assert one.version == 5, "without a number: the last one kept"
    one.act("reset", "test").result(WAIT)
    assert one.act("digest", "test").result(WAIT) == {"version": 0, "sha256": digests[0]}
    with pytest.raises(NoVersion, match="version 3 is not kept"):
        one.act("rollback", "test", version=3).result(WAIT)
    assert one.version == 0


def test_rolling_back_to_the_only_version_kept_does_not_lose_it(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshots=1)
    one.start()
    settle([one.submit(images(4))])
    one.act("snapshot", "test").result(WAIT)
    before = one.act("digest", "test").result(WAIT)
    settle([one.submit(images(4))])
    assert one.act("rollback", "test", version=1).result(WAIT)["version"] == 1
    assert one.act("digest", "test").result(WAIT) == before


def test_a_kept_version_answers_beside_the_present_one(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshot_every=1)
    one.start()
    x = images(6)
    settle([one.submit(x)])
    at_one = one.submit(x, PREDICT).result(WAIT)
    settle([one.submit(images(6, seed=n)) for n in range(2)])
    again = one.submit(x, "1").result(WAIT)
    assert again.version == "1"
    assert np.allclose(again.logits, at_one.logits, atol=1e-6)
    assert not np.allclose(one.submit(x, PREDICT).result(WAIT).logits, at_one.logits, atol=1e-4)
    with pytest.raises(NoVersion):
        one.submit(x, "77").result(WAIT)


def test_a_restart_continues_from_the_checkpoint_exactly(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshot_every=2)
    one.start()
    for seed in range(3):
        settle([one.submit(images(4, seed=seed))])
    one.act("freeze", "test").result(WAIT)
    one.close()
    one.join(WAIT)
    two = worker(tmp_path, snapshot_every=2)
    assert (two.version, two.newest, two.steps, two.frozen) == (3, 3, 3, True)
    assert same(state(two.adapter), state(one.adapter))
    assert [v.number for v in two.versions.list()] == [0, 2]
    two.start()
    two.act("thaw", "test").result(WAIT)
    twin = tent()
    for seed in range(4):
        expected = twin(images(4, seed=seed))
    assert np.allclose(two.submit(images(4, seed=3)).result(WAIT).logits, expected.numpy(), atol=1e-6)


def test_versions_kept_after_the_last_checkpoint_have_their_numbers_for_themselves(tmp_path: Path) -> None:
    """Killed before the next checkpoint: what was kept stays what it was."""
    one = worker(tmp_path, snapshot_every=2)
    one.start()
    for seed in range(3):
        settle([one.submit(images(4, seed=seed))])
    kept = (tmp_path / "versions" / "version-2.safetensors").read_bytes()
    two = worker(tmp_path, snapshot_every=2)
    two.start()
    for seed in range(4):
        settle([two.submit(images(4, seed=seed))])
    two.act("digest", "test").result(WAIT)
    assert two.version == 6, "3 is the first"
    assert [v.number for v in two.versions.list()] == [0, 2, 4, 6]
    assert (tmp_path / "versions" / "version-2.safetensors").read_bytes() == kept
    for each in (one, two):
        each.close()
        each.join(WAIT)


def test_looking_at_versions_leaves_torchs_random_numbers_alone(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshot_every=1)
    one.start()
    for seed in range(2):
        settle([one.submit(images(4, seed=seed))])
    torch.rand(1)
    one.act("checkpoint", "test").result(WAIT)
    before = torch.get_rng_state()
    settle([one.submit(images(4), "1")])
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    worker(tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "those of the checkpoint, not of a version"
    one.close()


def test_a_version_whose_file_is_gone_is_not_found(tmp_path: Path) -> None:
    one = worker(tmp_path, snapshot_every=1)
    one.start()
    for seed in range(3):
        settle([one.submit(images(4, seed=seed))])
    before = one.act("digest", "test").result(WAIT)
    for number in (1, 2):
        (tmp_path / "versions" / f"version-{number}.safetensors").unlink()
    with pytest.raises(NoVersion, match="version 1 can no longer be read"):
        one.act("rollback", "test", version=1).result(WAIT)
    with pytest.raises(NoVersion, match="version 2 can no longer be read"):
        one.submit(images(4), "2").result(WAIT)
    assert one.act("digest", "test").result(WAIT) == before
    one.close()


def test_a_checkpoint_that_is_not_a_servers_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as kept:
        kept.save(tent(), {"position": 7})
    with pytest.raises(CheckpointError, match="not a server's: it does not tell frozen, newest, steps, version"):
        worker(tmp_path)


def test_an_action_is_on_the_disk_when_it_is_answered(tmp_path: Path) -> None:
    """Nothing but the action has changed since the last checkpoint, and the process may be killed right after it."""
    one = worker(tmp_path)
    one.start()
    settle([one.submit(images(4))])
    one.act("checkpoint", "test").result(WAIT)
    one.act("freeze", "test").result(WAIT)
    two = worker(tmp_path)
    assert (two.version, two.frozen) == (1, True)


def test_checkpoints_come_by_themselves_and_a_full_disk_does_not_stop_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(tmp_path, checkpoint_seconds=0.1)
    one.start()
    settle([one.submit(images(4))])
    until(lambda: one.checkpoints.latest() is not None)
    one.checkpoints.wait()
    assert not one.changed

    def full(*_: Any) -> None:
        raise CheckpointError("the disk is full")

    save = one.checkpoints.save
    monkeypatch.setattr(one.checkpoints, "save", full)
    written = one.checkpointed
    assert one.submit(images(4)).result(WAIT).adapted
    until(lambda: one.watch.metrics.checkpoint_failures._value.get() > 0)
    assert one.submit(images(4)).result(WAIT).adapted
    assert one.checkpointed == written
    failures = one.watch.metrics.checkpoint_failures._value.get()
    until(lambda: one.watch.metrics.checkpoint_failures._value.get() > failures + 1)     # it tries again by itself
    monkeypatch.setattr(one.checkpoints, "save", save)
    until(lambda: one.checkpointed > written)
    assert worker(tmp_path).version == 3


@pytest.mark.filterwarnings("default::petal.PetalWarning")
def test_a_checkpoint_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a server that has nothing else to do; until then an admin is told so."""
    one = worker(tmp_path, checkpoint_seconds=0.2)
    write, full = petal.checkpoint.write_state, True

    def refusing(*arguments: Any) -> None:
        if full:
            raise CheckpointError("the disk is full")
        write(*arguments)

    monkeypatch.setattr(petal.checkpoint, "write_state", refusing)
    one.start()
    settle([one.submit(images(4))])
    assert one.act("checkpoint", "test").result(WAIT)["written"] is False
    assert one.changed
    full = False
    until(lambda: one.checkpoints.latest() is not None)
    one.checkpoints.wait()
    until(lambda: not one.changed)


def test_an_idle_worker_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its last checkpoint is long ago: it waits to be told, and does not look again and again."""
    one = worker(tmp_path, checkpoint_seconds=0.1)
    looks: list[float] = []
    inner = one._seconds_to_checkpoint
    monkeypatch.setattr(one, "_seconds_to_checkpoint", lambda: looks.append(0.0) or inner())
    one.start()
    settle([one.submit(images(4))])
    until(lambda: not one.changed)
    before = len(looks)
    time.sleep(0.5)
    assert len(looks) - before <= 3


def test_the_end_answers_what_was_accepted_and_nothing_else(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo, queue=100)
    futures = [one.submit(sample(0.6, 5)) for _ in range(10)]
    one.close()
    with pytest.raises(Closed):
        one.submit(sample(0.6))
    one.start()
    assert len(settle(futures)) == 10
    one.join(WAIT)
    assert not one.is_alive()


def test_abandoned_requests_are_told(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo, queue=100)
    futures = [one.submit(sample(0.6, 5)) for _ in range(4)]
    one.abandon()
    for future in futures:
        with pytest.raises(Closed):
            future.result(0)
    assert one.waiting == 0


def test_cancelled_requests_are_not_adapted_to(echo: Worker) -> None:
    gone, here = echo.submit(sample(0.6)), echo.submit(sample(0.7))
    assert gone.cancel()
    echo.start()
    settle([here])
    assert np.allclose(echo.adapter.batches, [[0.7]])


class Broken(Echo):
    def prediction(self, x: Tensor) -> Tensor:
        return x[:, 0, 0, :5] / torch.where(x[:, 0, 0, :1] == 0.75, 0.0, 1.0)


def test_an_answer_that_is_not_finite_is_an_error_for_its_request_only(tmp_path: Path) -> None:
    one = worker(tmp_path, Broken)
    good, bad = one.submit(sample(0.6)), one.submit(sample(0.75))
    one.start()
    assert np.isfinite(good.result(WAIT).logits).all()
    with pytest.raises(Unanswered):
        bad.result(WAIT)


class FakeGuard(nn.Module):
    """The interface of petal.Guard around an adapter: an alarm on the third call, which freezes."""

    def __init__(self, adapter: petal.Adapter, policy: str = "freeze") -> None:
        super().__init__()
        self.adapter, self.policy = adapter, policy
        self.alarms: list[Alarm] = []
        self.pulls = 3
        self.frozen, self.calls = False, 0
        self.device, self.dtype = adapter.device, adapter.dtype
        self.model, self.adapted, self.kind = adapter.model, adapter.adapted, "Guard(Tent)"

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        self.calls += 1
        logits = self.adapter.predict(x) if self.frozen else self.adapter(x)
        if self.calls == 3:
            self.alarms.append(Alarm(self.calls, "entropy", 0.01, 0.1, self.policy))
            self.frozen = self.policy == "freeze"
        return logits

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        return self.adapter.predict(x)

    def reset(self) -> None:
        self.adapter.reset()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    def status(self) -> dict[str, float]:
        return {"entropy": 0.5, "concentration": float(self.calls)}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {**self.adapter.state_dict(), "guard.calls": torch.tensor(self.calls)}

    def load_state_dict(self, state: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        self.calls = int(state["guard.calls"])
        self.adapter.load_state_dict({k: v for k, v in state.items() if k != "guard.calls"})


class Forgetful(FakeGuard):
    """Knows no more of its alarms after a reset."""

    def reset(self) -> None:
        super().reset()
        self.alarms, self.calls = [], 0


def test_alarms_after_a_roll_back_are_told_once_each(tmp_path: Path) -> None:
    one = worker(tmp_path, tent, Forgetful(tent(), "rollback"))
    one.start()
    for _ in range(3):
        settle([one.submit(images(4))])
    one.act("rollback", "test", version=0).result(WAIT)
    for _ in range(4):
        settle([one.submit(images(4))])
    one.act("freeze", "test").result(WAIT)      # when it is answered, what was before it has been told
    told = [e["signal"] for e in one.audit.last(50) if e["by"] == "guard"]
    assert told == ["entropy", "entropy"]


def test_what_the_guard_does_is_counted_audited_and_kept_to(tmp_path: Path) -> None:
    one = worker(tmp_path, tent, FakeGuard(tent()))
    one.start()
    for _ in range(3):
        assert one.submit(images(4)).result(WAIT).adapted
    until(lambda: one.watch.metrics.frozen._value.get() == 1)
    assert not one.submit(images(4)).result(WAIT).adapted
    assert one.watch.totals["alarms"] == 1
    assert one.watch.metrics.pulls._value.get() == 3
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    (entry,) = [e for e in entries if e["by"] == "guard"]
    assert (entry["action"], entry["signal"], entry["value"], entry["limit"]) == ("freeze", "entropy", 0.01, 0.1)

    def signals() -> dict[str, float]:
        return {s.labels["signal"]: s.value for m in one.watch.metrics.signals.collect() for s in m.samples}

    until(lambda: signals() == {"entropy": 0.5, "concentration": 4.0})
    assert one.version == 3, "a guard that rests predicts only"
    one.act("thaw", "test").result(WAIT)
    assert not one.adapter.frozen, "the guard was told too"
    assert one.submit(images(4)).result(WAIT).adapted


def test_every_action_that_changes_adaptation_is_in_the_audit_log(tmp_path: Path) -> None:
    one = worker(tmp_path)
    one.start()
    settle([one.submit(images(4))])
    for action in ("snapshot", "freeze", "thaw", "rollback", "reset"):
        one.act(action, "10.1.2.3").result(WAIT)
    one.close()
    one.join(WAIT)
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [e["action"] for e in entries] == ["start", "snapshot", "freeze", "thaw", "rollback", "reset", "stop"]
    assert {e["by"] for e in entries[1:-1]} == {"10.1.2.3"}
    assert [e["version"] for e in entries] == [0, 1, 1, 1, 0, 0, 0]


def test_the_page_and_metrics_see_the_batches(tmp_path: Path) -> None:
    one = worker(tmp_path, compare_seconds=0.0)
    one.start()
    x = images(6)
    answer = one.submit(x).result(WAIT)
    source = one.submit(x, SOURCE).result(WAIT)
    until(lambda: one.watch.metrics.version._value.get() == 1)
    m = one.watch.metrics
    assert m.confidence._value.get() == pytest.approx(answer.probabilities.max(1).mean(), abs=1e-6)
    assert m.entropy._value.get() == pytest.approx(answer.entropy.mean(), abs=1e-6)
    assert m.disagreement._value.get() == pytest.approx((answer.label != source.label).mean())
    assert len(one.watch.images) == 6
    assert np.array_equal(one.watch.images[2].pixels, x[2].numpy())
    assert [i.source_label for i in one.watch.images] == source.label.tolist()
    settle([one.submit(x)])
    until(lambda: m.drift._value.get() > 0)       # of the weights after the first step


def test_the_digest_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    one = worker(tmp_path)
    one.start()
    settle([one.submit(images(4))])
    one.act("checkpoint", "test").result(WAIT)
    told = one.act("digest", "test").result(WAIT)["sha256"]
    twin = tent()
    petal.load(twin, one.checkpoints.latest())
    assert digest(twin.state_dict()) == told
