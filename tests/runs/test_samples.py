import json
from pathlib import Path

import numpy as np
import pytest

from petal.runs import make_manifest, open_run, run_job
from runs.parts import Stop, job, opened, stopping_at, without_time


def test_samples_are_the_first_images_of_each_domain(source: Path, tmp_path: Path) -> None:
    o = opened(source, shuffle=True)
    j = job("bn")
    run_job(j, tmp_path, o)
    place = tmp_path / "jobs" / j.id
    samples = json.loads((place / "samples.json").read_text())
    images = np.load(place / "samples.npz")["images"]
    assert (len(samples), images.shape, images.dtype) == (60, (60, 32, 32, 3), np.uint8)
    batch = next(iter(o.stream(1)))
    assert (images[0] == batch.x[0].mul(255).round().byte().permute(1, 2, 0).numpy()).all()
    adapter = o.adapter(j.row, 0)
    probability, label = adapter(batch.x).softmax(1).max(1)
    assert [s["predicted"] for s in samples[:4]] == label[:4].tolist()
    assert [s["probability"] for s in samples[:4]] == pytest.approx(probability[:4].tolist())
    assert [s["label"] for s in samples[:4]] == batch.y[:4].tolist()
    assert [s["index"] for s in samples[:4]] == batch.index[:4].tolist() != [0, 1, 2, 3]


def test_gradual_keeps_samples_of_the_highest_severity(source: Path, tmp_path: Path) -> None:
    o = opened(source, recipe="cifar10-gradual", images=2, batch_size=2)
    records = run_job(job("source"), tmp_path, o)
    assert len(records) == 131
    samples = json.loads((tmp_path / "jobs" / "source-o1-s0" / "samples.json").read_text())
    assert {s["severity"] for s in samples} == {5}
    assert len(samples) == 30


@pytest.mark.parametrize("size", [0, 300])
def test_damaged_samples_do_not_stop_a_job(source: Path, tmp_path: Path, size: int) -> None:
    o = opened(source)
    j = job("bn")
    whole = run_job(j, tmp_path / "whole", o)
    with pytest.raises(Stop):
        run_job(j, tmp_path, o, checkpoint_every=3, progress=stopping_at(11))
    pictures = tmp_path / "jobs" / j.id / "samples.npz"
    pictures.write_bytes(pictures.read_bytes()[:size])
    assert without_time(run_job(j, tmp_path, o)) == without_time(whole)
    with np.load(pictures) as archive:
        assert len(archive["images"]) == len(json.loads(pictures.with_suffix(".json").read_text()))


def test_killed_between_the_two_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures are newer than the list: a report shows what both have, and the job goes on."""
    from petal import report
    from petal.runs import samples

    o, j = opened(source), job("bn")
    open_run(tmp_path, make_manifest(o, [j]))
    with pytest.raises(Stop):
        run_job(j, tmp_path, o, checkpoint_every=6, progress=stopping_at(7))
    write = samples.write_json

    def dies(path: Path, content: object) -> None:
        raise Stop

    monkeypatch.setattr(samples, "write_json", dies)
    with pytest.raises(Stop):
        run_job(j, tmp_path, o, checkpoint_every=3)
    place = tmp_path / "jobs" / j.id
    pictures, listed = len(np.load(place / "samples.npz")["images"]), len(json.loads((place / "samples.json").read_text()))
    assert pictures > listed > 0
    (kept,) = (one.samples() for one in report.files.read_run(tmp_path).jobs)
    assert kept is not None
    assert len(kept.entries) == len(kept.images) == listed
    report.terminal(report.load(tmp_path))
    monkeypatch.setattr(samples, "write_json", write)
    run_job(j, tmp_path, o)
    assert len(json.loads((place / "samples.json").read_text())) == 60
