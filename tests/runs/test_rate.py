"""Equal time: which batches a method has time for, what it answers in between, and that resumed runs say the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from petal.errors import ConfigError
from petal.runs import make_manifest, open_run, run_job
from petal.runs.rate import Clock, clock_for, given_times
from runs.parts import Stop, job, opened, stopping_at, without_time


def taken(period: float, cost: float, batches: int, tick: float = 0.25) -> list[bool]:
    """The same by going through time in small steps: a camera that keeps one image, and a method that is busy or not."""
    waiting, left, done = None, 0.0, [False] * (batches + 1)
    for n in range(int((batches + 1) * period / tick)):
        now = n * tick
        if now % period == 0:
            waiting = int(now / period)         # in the place of one that was not taken
        if left <= 0 and waiting is not None:
            done[waiting], left, waiting = True, cost, None
        left -= tick
    return done[:batches]


@pytest.mark.parametrize("cost", [3.0, 10.0, 10.25, 26.0, 40.0, 95.5])
def test_the_clock_is_that_of_a_camera_that_keeps_one_image(cost: float) -> None:
    clock, found = Clock(10.0, cost), []
    for position in range(60):
        found.append(clock.in_time(position))
        if found[-1]:
            clock.learn(position, 0.0)
    assert found == taken(10.0, cost, 60)
    assert all(found) == (cost <= 10.0)


def test_measured_times_count_but_for_the_first_of_a_process() -> None:
    clock = Clock(1.0)
    clock.learn(0, 60.0)                    # programs were made
    assert clock.free == 1.0
    clock.learn(1, 2.5)
    assert clock.free == 3.5
    assert [clock.in_time(n) for n in (2, 3)] == [False, True]


def test_a_slow_method_learns_from_some_batches_and_answers_the_others(source: Path, tmp_path: Path) -> None:
    o = opened(source, rate=0.5, rate_ms="source=10,tent=50")
    records = run_job(job("tent"), tmp_path, o)
    assert [r["learned"] for r in records] == taken(20.0, 50.0, 30)
    adapter = o.plain_adapter(job("tent").row)
    for record, batch in zip(records, o.stream(1), strict=True):
        logits = adapter(batch.x) if record["learned"] else adapter.predict(batch.x)
        assert record["error"] == pytest.approx(float((logits.argmax(1) != batch.y).float().mean()))
        assert record["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch.y)), rel=1e-3)


def test_what_is_missed_is_answered_by_one_pass_without_views(source: Path, tmp_path: Path) -> None:
    o = opened(source, rate=1.0, rate_ms="source=10,petal=1000000")
    records = run_job(job("petal"), tmp_path, o)
    assert [r["learned"] for r in records] == [True] + [False] * 29
    assert [r["views_used"] for r in records] == [True] + [False] * 29
    assert [r["restored"] > 0 for r in records] == [True] + [False] * 29
    adapter = o.plain_adapter(job("petal").row)
    batches = list(o.stream(1))
    adapter(batches[0].x)
    before = adapter.state_dict()
    answer = adapter.glance(batches[1].x)
    assert torch.allclose(answer, adapter.logits(adapter.teacher, batches[1].x).detach())
    after = adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stop", [1, 7, 10])
def test_a_run_in_pieces_gives_the_same_records(stop: int, source: Path, tmp_path: Path) -> None:
    o = opened(source, rate=1.0, rate_ms="source=10,tent=26")
    whole = run_job(job("tent"), tmp_path / "whole", o)
    with pytest.raises(Stop):
        run_job(job("tent"), tmp_path / "cut", o, checkpoint_every=3, progress=stopping_at(stop))
    again = run_job(job("tent"), tmp_path / "cut", o, checkpoint_every=3)
    assert without_time(again) == without_time(whole)
    assert 0 < sum(r["learned"] for r in whole) < 30


def test_the_source_s_time_stays_that_of_the_start(source: Path, tmp_path: Path) -> None:
    o = opened(source, rate=1.0)
    first = make_manifest(o, [job("source")])
    assert first["rate"] == 1.0
    assert first["rate_source_ms"] > 0      # measured
    kept = open_run(tmp_path, first | {"rate_source_ms": 123.0})
    assert kept["rate_source_ms"] == open_run(tmp_path, make_manifest(o, [job("tent")]))["rate_source_ms"] == 123.0
    records = run_job(job("tent"), tmp_path, o)
    assert records[0]["busy_until"] == pytest.approx(0.123)      # the first batch counts as one period
    given = replace(o, experiment=replace(o.experiment, rate_ms="source=10"))
    with pytest.raises(ConfigError, match="measured as 123 ms"):
        open_run(tmp_path, make_manifest(given, [job("tent")]))


def test_times_of_rows_are_added_and_never_changed(source: Path, tmp_path: Path) -> None:
    def manifest(times: str) -> dict[str, object]:
        return make_manifest(opened(source, rate=1.0, rate_ms=times), [job("tent")])

    open_run(tmp_path, manifest("source=10,tent=20"))
    assert open_run(tmp_path, manifest("source=10,bn=12"))["rate_ms"] == {"source": 10.0, "tent": 20.0, "bn": 12.0}
    with pytest.raises(ConfigError, match="rate_ms of tent was 20 and is 21"):
        open_run(tmp_path, manifest("source=10,tent=21"))
    assert json.loads((tmp_path / "manifest.json").read_text())["rate_ms"]["tent"] == 20.0
    with pytest.raises(ConfigError, match=r"rate was 1\.0 and is 0\.5"):
        open_run(tmp_path, make_manifest(opened(source, rate=0.5, rate_ms="source=10"), [job("tent")]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rate": 0.0}, "rate=0"), ({"rate": 1.5}, "rate=1.5"), ({"rate_ms": "source=1"}, "give rate too"),
     ({"rate": 1.0, "after": True}, "leave after out")],
)  # fmt: skip
def test_what_a_rate_can_not_be(settings: dict[str, object], said: str, source: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(source, **settings)


@pytest.mark.parametrize("text", ["source", "source=fast", "source=0", "source=-3", "source=inf", "source=nan"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="rate_ms takes milliseconds"):
        given_times(text)


def test_a_time_for_a_row_that_does_not_exist(source: Path) -> None:
    with pytest.raises(ConfigError, match="no method 'tnet'"):
        make_manifest(opened(source, rate=1.0, rate_ms="tnet=3"), [job("tent")])


def test_without_a_rate_there_is_no_clock() -> None:
    assert clock_for({}, "tent") is None
