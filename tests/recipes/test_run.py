import errno
import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from petal import ConfigError, DiagonalGaussian, PetalWarning, evaluate, models
from petal.checkpoint import Checkpoints, read_state
from petal.data import digits
from petal.errors import StorageError
from petal.recipes import (
    WRAPPERS,
    Bench,
    Job,
    Progress,
    apply_settings,
    jobs_for,
    make_manifest,
    open_run,
    pick_rows,
    read_records,
    recipe,
    rows,
    run_job,
)
from petal.recipes.run import Lines, complete_lines, read_manifest

QUICK = {"views": 2, "confidence": 2.0}


def bench(source: Path, **options: object) -> Bench:
    chosen = replace(recipe("digits"), **QUICK)
    model = models.build("small", 10, source / "network.safetensors", **chosen.network_options)
    q = DiagonalGaussian.load(source / "posterior.safetensors")
    return Bench(chosen, digits("test"), model, q, images=16, batch_size=8, **options)


def job(name: str, b: Bench, seed: int = 0) -> Job:
    return Job(pick_rows(rows(b.recipe), [name])[0], 1, seed)


def without_time(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


class Stop(Exception):
    pass


def stopping_at(batch: int):
    def progress(p: Progress) -> None:
        if p.record is not None and p.position == batch:
            raise Stop

    return progress


@pytest.mark.parametrize(  # within a domain, at its end, before the first checkpoint, at a checkpoint, before the end
    ("name", "stop"),
    [("source", 1), ("tent-online", 9), ("tent-online", 10), ("petal", 10), ("petal", 9), ("cotta", 29), ("petal+small", 9)],
)
def test_interrupted_job_gives_the_same_records(name: str, stop: int, source: Path, tmp_path: Path) -> None:
    b = bench(source)
    j = job(name, b)
    whole = run_job(j, tmp_path / "whole", b)
    with pytest.raises(Stop):
        run_job(j, tmp_path / "cut", b, checkpoint_every=3, progress=stopping_at(stop))
    place = tmp_path / "cut" / "jobs" / j.id
    with (place / "records.jsonl").open("a") as file:
        file.write('{"position": 99, "tor')  # as a killed process leaves it
    again = run_job(j, tmp_path / "cut", b, checkpoint_every=3)
    assert len(whole) == 30
    assert without_time(again) == without_time(whole)
    assert without_time(read_records(place)) == without_time(whole)
    one, other = (json.loads((tmp_path / w / "jobs" / j.id / "samples.json").read_text()) for w in ("whole", "cut"))
    assert one == other
    assert json.loads((place / "job.json").read_text())["status"] == "done"
    assert not list(place.glob("*checkpoint*"))


def test_same_as_evaluate_and_what_a_record_has(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    for name in ("tent-online", "petal-sres"):
        row = rows(b.recipe)[name]
        records = run_job(Job(row), tmp_path, b)
        result = evaluate(b.adapter(row, 0), b.stream(1), reset_on_domain_change=row.reset_on_domain_change)
        assert [r["nll"] for r in records] == [r.nll for r in result.records]
        assert {"row", "order", "seed", "distance", "domain", "severity", "calibration", "restored"} <= records[0].keys()
        assert all(r["distance"] > 0 for r in records)
    assert "distance" not in run_job(job("bn", b), tmp_path, b)[0]


def test_distance_is_over_all_parameters(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    row = rows(b.recipe)["petal-none"]
    records = run_job(Job(row), tmp_path, b)
    adapter = b.adapter(row, 0)
    for batch in b.stream(1):
        adapter(batch.x)
        break
    start = b.posterior.mean
    squares = sum(float(((p.detach() - start[k]) ** 2).sum()) for k, p in adapter.model.named_parameters())
    count = sum(p.numel() for p in adapter.model.parameters())
    assert records[0]["distance"] == pytest.approx((squares / count) ** 0.5, rel=1e-4)


def test_samples_are_the_first_images_of_each_domain(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    j = job("bn", b)
    run_job(j, tmp_path, b)
    place = tmp_path / "jobs" / j.id
    samples = json.loads((place / "samples.json").read_text())
    images = np.load(place / "samples.npz")["images"]
    assert (len(samples), images.shape, images.dtype) == (60, (60, 32, 32, 3), np.uint8)
    batch = next(iter(b.stream(1)))
    assert (images[0] == batch.x[0].mul(255).round().byte().permute(1, 2, 0).numpy()).all()
    adapter = b.adapter(j.row, 0)
    probability, label = adapter(batch.x).softmax(1).max(1)
    assert [s["predicted"] for s in samples[:4]] == label[:4].tolist()
    assert [s["probability"] for s in samples[:4]] == pytest.approx(probability[:4].tolist())
    assert [s["label"] for s in samples[:4]] == batch.y[:4].tolist()


def test_gradual_keeps_samples_of_the_highest_severity(source: Path, tmp_path: Path) -> None:
    chosen = replace(recipe("cifar10-gradual"), builtin=True, network="small")
    b = replace(bench(source), recipe=chosen, images=2, batch_size=2, severity=None)
    records = run_job(job("source", b), tmp_path, b)
    assert len(records) == 131
    samples = json.loads((tmp_path / "jobs" / "source-o1-s0" / "samples.json").read_text())
    assert {s["severity"] for s in samples} == {5}
    assert len(samples) == 30


def test_jobs_run_a_seed_only_where_it_matters(source: Path) -> None:
    known = rows(recipe("cifar10"))
    jobs = jobs_for([known["bn"], known["tent"], known["petal"]], [1, 2], [3, 4])
    assert [j.id for j in jobs] == [
        "bn-o1-s0", "bn-o2-s0", "tent-o1-s0", "tent-o2-s0", "petal-o1-s3", "petal-o1-s4", "petal-o2-s3", "petal-o2-s4",
    ]  # fmt: skip


def test_a_folder_of_another_run_is_refused_and_more_jobs_are_added(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    files = {"weights": source / "network.safetensors", "posterior": source / "posterior.safetensors"}
    first = make_manifest(b, [job("bn", b)], **files)
    open_run(tmp_path, first)
    more = make_manifest(b, [job("petal", b, 1)], **files)
    merged = open_run(tmp_path, more)
    assert [j["id"] for j in merged["jobs"]] == ["bn-o1-s0", "petal-o1-s1"]
    assert merged["seeds"] == [0, 1]
    assert read_manifest(tmp_path) == merged
    assert merged["jobs"][1]["options"]["restore"] == "Fisher(quantile=0.03)"
    for key, value in (("severity", 3), ("batch_size", 10), ("fidelity", "paper"), ("engine", "eager")):
        other = make_manifest(replace(b, **{key: value}), [job("bn", b)], **files)
        with pytest.raises(ConfigError, match=f"{key} was .* and is {value!r}"):
            open_run(tmp_path, other)
    with pytest.raises(ConfigError, match="weights was"):
        open_run(tmp_path, make_manifest(b, [job("bn", b)], weights=source / "posterior.safetensors"))
    row = rows(b.recipe)["petal"]
    changed = Job(replace(row, options={**row.options, "ema": 0.5}), 1, 1)
    with pytest.raises(ConfigError, match=r"petal.ema was 0.99 and is 0.5"):
        open_run(tmp_path, make_manifest(b, [changed], **files))
    assert read_manifest(tmp_path) == merged
    older = {**merged, "versions": {**merged["versions"], "torch": "1.0"}}
    (tmp_path / "manifest.json").write_text(json.dumps(older))
    with pytest.warns(PetalWarning, match="another version of torch"):
        open_run(tmp_path, first)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="format"):
        open_run(tmp_path, first)


def test_damaged_newest_checkpoint_costs_no_more_than_the_work_since_the_older(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    j = job("petal", b)
    whole = run_job(j, tmp_path / "whole", b)
    with pytest.raises(Stop):
        run_job(j, tmp_path, b, checkpoint_every=3, progress=stopping_at(11))
    newest, older = Checkpoints(tmp_path / "jobs" / j.id).paths()
    newest.write_bytes(newest.read_bytes()[:100])
    position = read_state(older)[0]["extra"]["position"]
    started: list[int] = []
    with pytest.warns(PetalWarning, match=f"{newest.name} is damaged"):
        again = run_job(j, tmp_path, b, progress=lambda p: started.append(p.position))
    assert started[0] == position > 0
    assert without_time(again) == without_time(whole)


def test_jobs_added_by_two_at_once_are_all_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(source)
    open_run(tmp_path, make_manifest(b, [job("bn", b)]))
    both = threading.Barrier(2)

    def read(folder: Path) -> dict[str, object]:
        found = read_manifest(folder)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)                  # until the other has read it too, if it can
        return found

    monkeypatch.setattr("petal.recipes.run.read_manifest", read)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: open_run(tmp_path, make_manifest(b, [job(name, b)])), ["source", "tent"]))
    assert {j["row"] for j in read_manifest(tmp_path)["jobs"]} == {"bn", "source", "tent"}


def test_a_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file.jobs: Not a directory"):
        open_run(tmp_path / "file", make_manifest(b, [job("bn", b)]))
    with pytest.raises(StorageError, match=r"cannot write .*file.jobs.bn-o1-s0: Not a directory"):
        run_job(job("bn", b), tmp_path / "file", b)
    (tmp_path / "jobs" / "bn-o1-s0" / ".lock").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*\.lock: Is a directory"):
        run_job(job("bn", b), tmp_path, b)


@pytest.mark.parametrize("size", [0, 300])
def test_damaged_samples_do_not_stop_a_job(source: Path, tmp_path: Path, size: int) -> None:
    b = bench(source)
    j = job("bn", b)
    whole = run_job(j, tmp_path / "whole", b)
    with pytest.raises(Stop):
        run_job(j, tmp_path, b, checkpoint_every=3, progress=stopping_at(11))
    pictures = tmp_path / "jobs" / j.id / "samples.npz"
    pictures.write_bytes(pictures.read_bytes()[:size])
    assert without_time(run_job(j, tmp_path, b)) == without_time(whole)
    with np.load(pictures) as archive:
        assert len(archive["images"]) == len(json.loads(pictures.with_suffix(".json").read_text()))


@pytest.mark.parametrize("room_at", [None, 20])
def test_a_full_disk_does_not_stop_a_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_at: int | None
) -> None:
    """From batch 5 on nothing can be written: the run goes on and says so; with room again it ends well, or later does."""
    b = bench(source)
    j = job("petal", b)
    whole = run_job(j, tmp_path / "whole", b)
    full, fsync, reached = False, os.fsync, []

    def refusing(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    def progress(p: Progress) -> None:
        nonlocal full
        reached.append(p.position)
        full = p.position >= 5 and (room_at is None or p.position < room_at)

    monkeypatch.setattr(os, "fsync", refusing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if room_at is None:
            with pytest.raises(StorageError, match=r"records.jsonl: No space left on device"):
                run_job(j, tmp_path, b, checkpoint_every=2, progress=progress)
        else:
            assert without_time(run_job(j, tmp_path, b, checkpoint_every=2, progress=progress)) == without_time(whole)
    assert reached[-1] == 30
    assert any("the run goes on" in str(w.message) and "No space left" in str(w.message) for w in told)
    full, reached = False, []
    again = run_job(j, tmp_path, b, progress=lambda p: reached.append(p.position))
    assert without_time(again) == without_time(whole)
    assert reached[0] == 30 if room_at else reached[0] <= 4  # the write of batch 4 may have met the full disk


def test_lines_wait_for_room(tmp_path: Path) -> None:
    """A disk that takes a few bytes at a time, then none, then again: nothing is lost, torn or doubled."""
    lines = Lines(tmp_path / "r.jsonl")
    real, room = lines.file, 0

    class Disk:
        fileno = real.fileno

        def write(self, data: bytearray) -> int:
            nonlocal room
            if room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = min(room, len(data), 7)
            room -= count
            return real.write(bytes(data[:count]))

    lines.file = Disk()
    for number in range(10):
        room = (0, 0, 5, 1000, 11)[number % 5]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lines.add(json.dumps({"position": number}))
        assert bool(told) == bool(lines.waiting)
    room = 1000
    lines.sync()
    real.close()
    assert [r["position"] for r in complete_lines(tmp_path / "r.jsonl")[0]] == list(range(10))


def test_what_a_killed_process_left_is_removed(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    left = tmp_path / "jobs" / "source-o1-s0" / ".samples.npz.123.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    run_job(job("source", b), tmp_path, b)
    assert not left.exists()


def test_lost_records_are_made_again(source: Path, tmp_path: Path) -> None:
    """A checkpoint beyond the records (a disk that lost them) is not used."""
    b = bench(source)
    j = job("petal", b)
    with pytest.raises(Stop):
        run_job(j, tmp_path, b, checkpoint_every=3, progress=stopping_at(11))
    path = tmp_path / "jobs" / j.id / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    assert len(run_job(j, tmp_path, b)) == 30


def test_complete_lines_stop_at_the_first_that_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"position": 0}\n{"position": 1}\n{"position": 3}\n')
    assert complete_lines(path) == ([{"position": 0}, {"position": 1}], [16, 32])
    path.write_text('{"position": 0}\n{"position": 1}')
    assert complete_lines(path)[1] == [16]
    assert complete_lines(tmp_path / "none") == ([], [])


def test_posterior_and_severity_are_asked_for_by_name(source: Path) -> None:
    b = bench(source)
    with pytest.raises(ConfigError, match=r"PETAL \(FIM\) needs the source posterior"):
        replace(b, posterior=None).adapter(rows(b.recipe)["petal"], 0)
    with pytest.raises(ConfigError, match="leave the severity out"):
        Bench(recipe("cifar10-gradual"), b.data, b.model, severity=3)


def wrapped(name: str, b: Bench, *settings: str) -> Job:
    return Job(pick_rows(apply_settings(rows(b.recipe), settings, WRAPPERS), [name])[0])


def test_a_recurring_run_with_a_guard_in_pieces(source: Path, tmp_path: Path) -> None:
    """Stopped after any number of batches and continued by the same call: the same records, visit by visit."""
    b = replace(bench(source), visits=2)
    j = wrapped("petal+small+guard", b, "guard.every=4", "small.memory=16", "small.every=8")
    whole = run_job(j, tmp_path / "whole", b)
    assert [r["visit"] for r in whole] == [0] * 30 + [1] * 30
    assert whole[-1]["guard"] == {"frozen": False, "alarms": 0, "pulls": 0, "signals": whole[-1]["guard"]["signals"]}
    assert "signals" not in whole[0]["guard"]
    assert set(whole[3]["guard"]["signals"]) >= {"disagreement", "distance"}
    place = tmp_path / "pieces" / "jobs" / j.id
    done = []
    while len(done) < 60:
        left = iter(range(16))
        done = run_job(j, tmp_path / "pieces", b, stop=lambda left=left: next(left) == 15)
        assert json.loads((place / "job.json").read_text())["status"] == ("done" if len(done) == 60 else "running")
    assert without_time(done) == without_time(whole)
    assert json.loads((place / "job.json").read_text())["options"]["guard"]["every"] == 4


def test_the_guard_s_alarms_are_in_the_records(source: Path, tmp_path: Path) -> None:
    b = bench(source)
    nervous = ("guard.every=1", "guard.disagreement=0.01", "guard.window=16", "guard.cooldown=24", "tent.lr=1")
    j = wrapped("tent+guard", b, *nervous)
    with pytest.warns(PetalWarning, match="signs of a collapse"):
        records = run_job(j, tmp_path, b)
    alarms = [r["guard"]["alarm"] for r in records if "alarm" in r["guard"]]
    assert len(alarms) == records[-1]["guard"]["alarms"] > 0
    assert alarms[0].keys() == {"step", "signal", "value", "limit", "action"}
    assert any(r["guard"]["frozen"] for r in records)


def test_labels_in_runs(source: Path, tmp_path: Path) -> None:
    b = replace(bench(source), label_correlation=0.1, batch_size=1, images=40)
    labels = [int(batch.y) for batch in b.stream(1)]
    iid = [int(batch.y) for batch in replace(b, label_correlation=None).stream(1)]
    same = [sum(x == y for x, y in pairwise(sequence)) for sequence in (labels, iid)]
    assert same[0] > 2 * same[1]
    first = make_manifest(b, [job("bn", b)])
    assert (first["stream"], first["label_correlation"]) == ("correlated", 0.1)
    open_run(tmp_path, first)
    with pytest.raises(ConfigError, match=r"label_correlation was 0\.1 and is None"):
        open_run(tmp_path, make_manifest(replace(b, label_correlation=None), [job("bn", b)]))
    with pytest.raises(ConfigError, match="leave one of them out"):
        replace(b, visits=2)
    with pytest.raises(ConfigError, match="that of cifar10-gradual is gradual"):
        Bench(recipe("cifar10-gradual"), b.data, b.model, visits=2)
