"""Reading run folders: what is whole is read as it is, what is not is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from petal.errors import DataError
from petal.evaluate import Record, summarize
from petal.report import draw, load, read_run

from .fakes import write_run

SOURCE = "source-standard-15-0"


def lines_of(run: Path, job: str = SOURCE) -> list[dict]:
    return [json.loads(line) for line in (run / "jobs" / job / "records.jsonl").read_text().splitlines()]


def write_lines(run: Path, lines: list[dict], job: str = SOURCE) -> None:
    (run / "jobs" / job / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def set_status(run: Path, job: str = SOURCE, **status: object) -> None:
    (run / "jobs" / job / "job.json").write_text(json.dumps(status))


def edit_manifest(run: Path, **changes: object) -> None:
    file = run / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_columns_are_the_records(run: Path) -> None:
    job = next(job for job in read_run(run).jobs if job.id == "cotta-standard-15-1")
    lines = lines_of(run, job.id)
    assert job.finished
    assert job.records is not None
    names = "position severity n error nll brier confidence entropy seconds restored distance"
    for name in names.split():
        np.testing.assert_array_equal(getattr(job.records, name), [line[name] for line in lines])
    np.testing.assert_array_equal(job.records.calibration, np.array([line["calibration"] for line in lines]))
    assert job.records.domain.tolist() == [line["domain"] for line in lines]


def test_scores_agree_with_evaluate(run: Path) -> None:
    fields = Record.__dataclass_fields__
    for job in read_run(run).jobs[:3]:
        assert job.records is not None
        result = summarize(Record(**{k: v for k, v in line.items() if k in fields}) for line in lines_of(run, job.id))
        for domain, expected in {None: result.mean, **result.by_domain}.items():
            found = job.records.scores(domain)
            assert found.n == expected.n
            np.testing.assert_allclose(
                [found.error, found.nll, found.brier, found.ece],
                [expected.error, expected.nll, expected.brier, expected.ece],
                rtol=1e-12,
            )


def test_missing_numbers_have_defaults(small: Path) -> None:
    lines = lines_of(small)
    for line in lines:
        for name in ("distance", "restored", "skipped", "seconds", "views_used"):
            line.pop(name)
    write_lines(small, lines)
    records = read_run(small).jobs[0].records
    assert records is not None
    assert np.isnan(records.distance).all()
    assert np.isnan(records.seconds).all()
    assert not records.restored.any()


def test_skipped_updates_count_across_resets(small: Path) -> None:
    lines = lines_of(small)[:6]
    for line, skipped in zip(lines, [0, 2, 2, 0, 1, 1], strict=True):
        line["skipped"] = skipped
    write_lines(small, lines)
    set_status(small, status="done")
    report = load(small)
    assert report.sections[0].rows[0].skipped == 3
    assert any("Source skipped 3 updates" in note for note in report.sections[0].notes())


def test_torn_last_line_of_an_unfinished_job_is_left_out(small: Path) -> None:
    file = small / "jobs" / SOURCE / "records.jsonl"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(DataError, match=r"records\.jsonl, line 8 is not whole JSON"):
        load(small)
    set_status(small, status="running")
    job = read_run(small).jobs[0]
    assert not job.finished
    assert job.batches == 7


def test_job_that_was_not_started(small: Path) -> None:
    for file in (small / "jobs" / SOURCE).iterdir():
        file.unlink()
    (small / "jobs" / SOURCE).rmdir()
    section = load(small).sections[0]
    assert any("Unfinished" in note and "no batch yet" in note for note in section.notes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": None}, "error should be a number"),
        ({"error": "0.1"}, "error should be a number"),
        ({"n": 0}, "a batch of 0 samples"),
        ({"n": 2.5}, "n should be a whole number"),
        ({"position": True}, "position should be a whole number"),
        ({"position": 0}, "batch 0 comes after batch 1"),
        ({"domain": ""}, "domain should be a name"),
        ({"calibration": [[1, 2], [3]]}, "calibration should be three rows"),
        ({"calibration": [[10.0], [9.0], [8.0]]}, "1 calibration bins, 15 in the lines before"),
        ({"n": 11}, "the calibration counts sum to 10 samples; the batch has 11"),
    ],
)
def test_bad_record(small: Path, change: dict, message: str) -> None:
    lines = lines_of(small)
    lines[2] |= change
    write_lines(small, lines)
    with pytest.raises(DataError, match=message) as caught:
        load(small)
    assert "records.jsonl, line 3" in str(caught.value)


def test_foreign_and_missing_folders(tmp_path: Path, small: Path) -> None:
    with pytest.raises(DataError, match="at least one run folder"):
        load()
    with pytest.raises(DataError, match="is not a folder"):
        load(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"manifest\.json is missing; the run folders in it are small"):
        load(tmp_path)
    with pytest.raises(DataError, match="given twice"):
        load(small, tmp_path / "." / "small")
    edit_manifest(small, format="other-2")
    with pytest.raises(DataError, match="has format 'other-2'"):
        load(small)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not whole JSON"),
        ("[]", "one JSON object"),
        ('{"format": "petal-run-1"}', "lists no jobs"),
        (b"\xff\xfe", "not text"),
    ],
)
def test_bad_manifest(small: Path, text: str | bytes, message: str) -> None:
    (small / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        load(small)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (["x"], "a job should be an object"),
        ([{"id": "../../etc"}], "should name a folder"),
        ([{"id": "a", "options": [1]}], "options of job 'a'"),
        ([{"id": SOURCE}, {"id": SOURCE}], "lists the job 'source-standard-15-0' twice"),
    ],
)
def test_bad_jobs(small: Path, jobs: list, message: str) -> None:
    edit_manifest(small, jobs=jobs)
    with pytest.raises(DataError, match=message):
        load(small)


def test_done_jobs_must_be_whole(small: Path) -> None:
    file = small / "jobs" / SOURCE / "records.jsonl"
    set_status(small, status="done", batches=9)
    with pytest.raises(DataError, match=r"has 8 records; .* says 9"):
        load(small)
    file.write_text("")
    with pytest.raises(DataError, match="is empty"):
        load(small)
    file.unlink()
    with pytest.raises(DataError, match="is missing, though"):
        load(small)
    (small / "jobs" / SOURCE / "job.json").write_text("{}")
    with pytest.raises(DataError, match="says no status"):
        load(small)


def test_bad_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=4, samples=True)
    job = read_run(run).jobs[0]
    kept = job.samples()
    assert kept is not None
    assert kept.images.shape == (16, 16, 16, 3)
    (job.folder / "samples.json").write_text("[]")
    with pytest.raises(DataError, match=r"samples\.json should describe the 16 images"):
        job.samples()
    np.savez(job.folder / "samples.npz", images=np.zeros((2, 4, 4, 3)))
    with pytest.raises(DataError, match="should be 8-bit"):
        job.samples()
    (job.folder / "samples.npz").write_bytes(b"PK torn")
    with pytest.raises(DataError, match="holds no readable"):
        job.samples()


@pytest.mark.parametrize("left", [None, "samples.json", "samples.npz"])
def test_pictures_may_be_left_behind(tmp_path: Path, left: str | None) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=4, samples=True)
    job = read_run(run).jobs[0]
    for name in {"samples.json", "samples.npz"} - {left}:
        (job.folder / name).unlink()
    assert job.samples() is None
    assert "samples" not in [drawing.name for drawing in draw(load(run).sections[0])]


def test_folder_of_a_sweep_is_that_of_its_runs(tmp_path: Path, small: Path) -> None:
    """Only those that the sweep names and that have begun; another kind of sweep is refused."""
    write_run(tmp_path / "other", ("source",), batches=2, n=10)
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"format": "petal-sweep-1", "runs": {"small": {}, "not-yet": {}}}))
    assert [folder.name for folder in load(tmp_path).folders] == ["small"]
    sweep.write_text(json.dumps({"format": "petal-sweep-1", "runs": {"not-yet": {}}}))
    with pytest.raises(DataError, match="no run of this sweep has begun"):
        load(tmp_path)
    sweep.write_text(json.dumps({"format": "petal-sweep-2", "runs": {"small": {}}}))
    with pytest.raises(DataError, match="reads 'petal-sweep-1'"):
        load(tmp_path)


@pytest.mark.parametrize("newer", ["samples.json", "samples.npz"])
def test_a_job_that_was_killed_between_its_two_picture_files(tmp_path: Path, newer: str) -> None:
    """One of the files tells of more pictures than the other: those that both have are shown."""
    run = write_run(tmp_path / "run", ("source",), batches=1, n=4, samples=True, unfinished=("source-standard-15-0",))
    folder = read_run(run).jobs[0].folder
    whole = read_run(run).jobs[0].samples()
    assert whole is not None
    entries = json.loads((folder / "samples.json").read_text())
    if newer == "samples.json":
        np.savez(folder / "samples.npz", images=whole.images[:5])
    else:
        (folder / "samples.json").write_text(json.dumps(entries[:5]))
    kept = read_run(run).jobs[0].samples()
    assert kept is not None
    assert kept.entries == entries[:5]
    assert (kept.images == whole.images[:5]).all()
    assert draw(load(run).sections[0])
