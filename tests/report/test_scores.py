"""Which jobs are averaged with which, and what comes out, against NumPy."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from petal.errors import DataError
from petal.report import METRICS, load
from petal.report.html import html
from petal.report.scores import ResultRow, Section

from .fakes import DOMAINS, ROWS, write_run


def row_of(section: Section, label: str) -> ResultRow:
    return next(row for row in section.rows if row.label == label)


def by_hand(run: Path, job: str, metric: str, domain: str | None = None) -> float:
    """A score straight from the JSON lines."""
    lines = [json.loads(line) for line in (run / "jobs" / job / "records.jsonl").read_text().splitlines()]
    lines = [line for line in lines if domain in (None, line["domain"])]
    if metric == "ece":
        bins = np.sum([line["calibration"] for line in lines], axis=0)
        return float(sum(abs(c - a) for c, a in zip(bins[1], bins[2], strict=True)) / bins[0].sum())
    return float(np.average([line[metric] for line in lines], weights=[line["n"] for line in lines]))


@pytest.mark.parametrize("metric", METRICS)
def test_mean_and_std_over_seeds(run: Path, metric: str) -> None:
    row = row_of(load(run).sections[0], "CoTTA")
    for domain in (None, *DOMAINS):
        values = [by_hand(run, f"cotta-standard-15-{seed}", metric, domain) for seed in (0, 1, 2)]
        found = row.stat(metric, domain)
        assert found.n == 3
        assert found.mean == pytest.approx(sum(values) / 3, rel=1e-12)
        spread = math.sqrt(sum((v - sum(values) / 3) ** 2 for v in values) / 2)
        assert found.std == pytest.approx(spread, rel=1e-9)


def test_unfinished_jobs_are_in_no_average(run: Path) -> None:
    section = load(run).sections[0]
    row = row_of(section, "PETAL (FIM)")
    expected = np.mean([by_hand(run, f"petal-fim-standard-15-{seed}", "error") for seed in (0, 1)])
    assert row.stat("error").n == 2
    assert row.stat("error").mean == pytest.approx(expected, rel=1e-12)
    assert [job.id for job in row.unfinished] == ["petal-fim-standard-15-2"]
    note = next(note for note in section.notes() if note.startswith("Unfinished"))
    assert "PETAL (FIM)" in note
    assert "seed 2" in note
    assert "12 of 24 batches" in note


@pytest.mark.parametrize("first", [True, False])
def test_a_job_that_another_folder_has_finished_is_not_missing(tmp_path: Path, first: bool) -> None:
    begun, whole = (write_run(tmp_path / name, ("cotta",), seeds=(3,), batches=2, n=10) for name in ("begun", "whole"))
    shutil.rmtree(begun / "jobs" / "cotta-standard-15-3")
    report = load(*((begun, whole) if first else (whole, begun)))
    section, = report.sections
    assert section.rows[0].stat("nll").mean == pytest.approx(by_hand(whole, "cotta-standard-15-3", "nll"))
    assert not any("Unfinished" in note for note in section.notes())
    assert "1 of 1 runs finished" in html(report)


def test_a_single_run_has_no_std(run: Path) -> None:
    section = load(run).sections[0]
    assert row_of(section, "Source").stat("error").std is None
    assert row_of(section, "Source").over == "1 run"
    assert row_of(section, "CoTTA").over == "3 seeds"
    assert any("no standard deviation: Source, BN Adapt" in note for note in section.notes())


def test_rows_in_the_papers_order_whatever_the_runs(tmp_path: Path) -> None:
    shuffled = ("petal-fim", "cotta", "source", "petal-sres", "tent-online", "bn", "tent-continual", "pseudo-label")
    later = write_run(tmp_path / "a", shuffled[:3], batches=1, n=5)
    first = write_run(tmp_path / "b", shuffled[3:], batches=1, n=5)
    section, = load(later, first).sections
    assert [row.method for row in section.rows] == [ROWS[row][0] for row in ROWS]
    assert section.domains == DOMAINS


def test_seeds_from_two_folders_share_a_row(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), ("cotta",), seeds=(seed,), batches=2, n=10) for seed in (3, 4)]
    section, = load(*runs).sections
    values = [by_hand(run, f"cotta-standard-15-{seed}", "nll") for run, seed in zip(runs, (3, 4), strict=True)]
    assert section.rows[0].stat("nll").mean == pytest.approx(np.mean(values))
    assert section.rows[0].stat("nll").std == pytest.approx(np.std(values, ddof=1))


def test_the_same_seed_twice_is_two_rows(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ("cotta",), batches=2, n=10) for name in ("before", "after")]
    section, = load(*runs).sections
    assert [(row.label, len(row.jobs)) for row in section.rows] == [("CoTTA [before]", 1), ("CoTTA [after]", 1)]


def test_same_job_twice_in_one_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("cotta",), seeds=(0, 1), batches=2, n=10)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["jobs"][1]["seed"] = 0
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="have the same row, order and seed"):
        load(run)


def test_fidelity_and_options_tell_rows_apart(tmp_path: Path) -> None:
    official = write_run(tmp_path / "a", ("source", "petal-fim"), batches=2, n=10)
    paper = write_run(tmp_path / "b", ("petal-fim",), batches=2, n=10, manifest={"fidelity": "paper"})
    section, = load(official, paper).sections
    assert [row.label for row in section.rows] == ["Source", "PETAL (FIM)", "PETAL (FIM) [paper fidelity]"]
    manifest = json.loads((paper / "manifest.json").read_text())
    manifest |= {"fidelity": "official"}
    manifest["jobs"][0]["options"] = {"restore": "fisher:0.03", "views": 8}
    (paper / "manifest.json").write_text(json.dumps(manifest))
    section, = load(official, paper).sections
    assert [row.label for row in section.rows][1:] == ["PETAL (FIM) [views=32]", "PETAL (FIM) [views=8]"]


@pytest.mark.parametrize(
    "change",
    [
        {"severity": 3},
        {"batch_size": 10},
        {"recipe": "cifar100"},
        {"weights": {"sha256": "other"}},
        {"data": {"sha256": "other"}},
        {"stream": "mixed"},
        {"stream_seed": 7},
        {"images": 200},
        {"visits": 2},
        {"label_correlation": 0.1},
        {"network": "resnet-50"},
    ],
)
def test_what_cannot_be_compared_stands_in_two_tables(tmp_path: Path, change: dict) -> None:
    runs = [write_run(tmp_path / "a", ("source",), batches=1, n=5),
            write_run(tmp_path / "b", ("source",), batches=1, n=5, manifest=change)]  # fmt: skip
    report = load(*runs)
    assert len(report.sections) == 2
    assert len({section.title for section in report.sections} | {section.slug for section in report.sections}) == 4


def test_paths_do_not_part_runs_with_the_same_hashes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", ("source",), batches=1, n=5),
            write_run(tmp_path / "b", ("bn",), batches=1, n=5,
                      manifest={"data": {"path": "/elsewhere", "sha256": "ab" * 32}})]  # fmt: skip
    assert len(load(*runs).sections) == 1


def test_other_domains_are_another_table(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", ("source",), batches=1, n=5),
            write_run(tmp_path / "b", ("bn",), batches=1, n=5, orders=(("1", DOMAINS[:2]),))]  # fmt: skip
    assert [section.domains for section in load(*runs).sections] == [DOMAINS, DOMAINS[:2]]


def test_std_over_orders(tmp_path: Path) -> None:
    orders = (("imagenet-c:1", DOMAINS), ("imagenet-c:2", DOMAINS[::-1]))
    run = write_run(tmp_path / "run", ("source", "cotta"), orders=orders, batches=2, n=10)
    section, = load(run).sections
    values = [by_hand(run, f"source-imagenet-c-{n}-0", "error") for n in (1, 2)]
    row = section.rows[0]
    assert row.over == "2 orders"
    assert row.stat("error").std == pytest.approx(np.std(values, ddof=1))
    assert section.domains == DOMAINS
    assert any(note.startswith("2 orders of the domains") for note in section.notes())


def test_gradual_averages_over_all_pairs(tmp_path: Path) -> None:
    severities = (1, 3, 5, 3, 1)
    run = write_run(tmp_path / "run", ("cotta",), batches=2, n=10, severities=severities,
                    manifest={"recipe": "cifar10-gradual", "severity": None})  # fmt: skip
    section, = load(run).sections
    lines = [json.loads(line) for line in (run / "jobs/cotta-standard-15-0/records.jsonl").read_text().splitlines()]
    pairs = [np.mean([line["brier"] for line in lines[i : i + 2]]) for i in range(0, len(lines), 2)]
    assert len(pairs) == 20
    assert section.rows[0].stat("brier").mean == pytest.approx(np.mean(pairs))
    assert section.gradual
    assert any("(20 in a run)" in note for note in section.notes())


def test_unequal_domains_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=2, n=10)
    file = run / "jobs/source-standard-15-0/records.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    (file.parent / "job.json").write_text('{"status": "done"}')
    section, = load(run).sections
    assert any(note.startswith("Domains differ in size") for note in section.notes())
    assert section.rows[0].stat("error").mean == pytest.approx(by_hand(run, "source-standard-15-0", "error"))


def test_scores_that_are_not_finite_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source", "bn"), batches=2, n=10)
    file = run / "jobs/source-standard-15-0/records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["nll"] = math.nan
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section, = load(run).sections
    assert "NLL is not finite for Source." in section.notes()
    assert math.isfinite(section.rows[0].stat("error").mean)


def test_shares_and_times(run: Path) -> None:
    section, = load(run).sections
    row = row_of(section, "PETAL (S-Res)")
    lines = [json.loads(line) for seed in (0, 1, 2)
             for line in (run / f"jobs/petal-sres-standard-15-{seed}/records.jsonl").read_text().splitlines()]  # fmt: skip
    assert row.views_share == pytest.approx(np.mean([line["views_used"] for line in lines]))
    assert row.restored_share == pytest.approx(np.mean([line["restored"] for line in lines]))
    each = np.array([line["seconds"] for line in lines]).reshape(3, -1)
    assert row.seconds == pytest.approx(np.mean(np.median(each, axis=1)))        # of each run, and over the runs
    assert row.images == 4 * 6 * 40
    np.testing.assert_allclose(row.calibration, np.sum([line["calibration"] for line in lines], axis=0))


def test_the_earlier_names_still_work() -> None:
    from petal import report

    with pytest.warns(DeprecationWarning, match="JobFolder"):
        assert report.Job is report.JobFolder
    with pytest.warns(DeprecationWarning, match="ResultRow"):
        assert report.Row is report.ResultRow
    with pytest.raises(AttributeError, match="nothing"):
        _ = report.nothing
