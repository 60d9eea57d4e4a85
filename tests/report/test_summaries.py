"""Summaries as data: the same pages come of them as of the records, and what was lost is said."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petal.errors import DataError
from petal.report import cost_table, difference, load, markdown, metric_table, pair_table, protocol_line, to_summary, verdict
from petal.report.contents import tables
from report.fakes import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("source", "bn", "cotta", "petal-sres", "petal-fim")
    return write_run(tmp_path_factory.mktemp("summaries") / "run", names, seeds=(0, 1, 2), batches=3)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_same_page_comes_of_the_data(folder: Path, tmp_path: Path) -> None:
    report = load(folder, notes=["a note"], remarks=["a remark"])
    text = to_summary(report)
    file = written(tmp_path / "data.json", text)
    again = load(file)
    assert markdown(again, paper=True) == markdown(report, paper=True)
    assert to_summary(again) == text
    assert again.notes == ("a note",)
    assert markdown(again).index("a remark") > markdown(again).index("All scores")
    files = [folder / f"jobs/cotta-standard-15-{seed}/records.jsonl" for seed in (0, 1, 2)]
    by_hand = np.mean([json.loads(line)["error"] for file in files for line in file.read_text().splitlines()])
    row = next(row for row in again.sections[0].rows if row.id == "cotta")
    assert row.stat("error").mean == pytest.approx(by_hand, abs=1e-6)
    assert len(text) < 60_000


def test_files_and_folders_stand_in_one_table(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "more", ("tent-continual",), batches=3)
    file = written(tmp_path / "data.json", to_summary(load(folder)))
    (section,) = load(file, other).sections
    assert [row.label for row in section.rows] == ["Source", "BN Adapt", "TENT-continual", "CoTTA", "PETAL (S-Res)",
                                                   "PETAL (FIM)"]  # fmt: skip
    with pytest.raises(DataError, match="given twice"):
        load(file, file)


def lost(folder: Path, path: Path) -> Path:
    """The data without the single runs of CoTTA."""
    report = load(folder)
    row = next(row for row in report.sections[0].rows if row.id == "cotta")
    data: dict[str, Any] = json.loads(to_summary(report))
    (run,) = data["runs"]
    jobs = [name for name, about in run["jobs"].items() if about["row"] == "cotta"]
    means = dict(run["jobs"][jobs[0]])
    for name in jobs:
        run["jobs"][name] = {key: run["jobs"][name][key] for key in ("row", "order", "seed")}
    means |= {name: row.stat(name).mean for name in ("error", "nll", "brier", "ece")}
    std = {name: row.stat(name).std for name in ("error", "nll", "brier", "ece")}
    data["averages"] = [{**means, "jobs": [[run["folder"], name] for name in jobs], "runs": 3, "std": std}]
    return written(path, json.dumps(data))


def test_averages_whose_runs_were_lost_are_shown_and_said(folder: Path, tmp_path: Path) -> None:
    report, whole = load(lost(folder, tmp_path / "lost.json")), load(folder)
    (section,), (before,) = report.sections, whole.sections
    shown, known = (metric_table(s).lines[2].cells for s in (section, before))
    assert [cell.plain for cell in shown[:4]] == [cell.plain for cell in known[:4]]
    assert shown[-1].text == "3 seeds"
    assert any(note == "Only averages over runs were kept, and not the single runs, of CoTTA." for note in section.notes())
    rows = {row.id: row for row in section.rows}
    found = difference(rows["cotta"], rows["source"], "error")
    assert (found.n, found.low) == (0, None)
    assert found.mean == pytest.approx(rows["cotta"].stat("error").mean - rows["source"].stat("error").mean)
    line = next(line for line in pair_table(section).lines if line.label == "CoTTA")
    assert line.cells[-1].text == "–"
    again = load(written(tmp_path / "again.json", to_summary(report)))
    assert markdown(again) == markdown(report)


def test_runs_beside_lost_ones_are_another_row(folder: Path, tmp_path: Path) -> None:
    more = write_run(tmp_path / "more", ("cotta",), seeds=(7,), batches=3)
    (section,) = load(lost(folder, tmp_path / "lost.json"), more).sections
    assert sum(row.id == "cotta" for row in section.rows) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read"), ("[]", "format None"), ('{"format": "petal-report-1"}', "--format data"),
     ('{"format": "petal-summary-1"}', "no whole summary"), ('{"format": "petal-summary-1", "runs": [{}]}', "whole summary"),
     ('{"format": "petal-summary-1", "runs": 3}', "whole summary")],
)  # fmt: skip
def test_a_file_that_is_no_summary(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "data.json", text))


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=5)
    file = run / "jobs/source-standard-15-0/records.jsonl"
    lines = [json.loads(line) | {"nll": math.nan} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = to_summary(load(run))
    assert "NaN" not in text
    again = load(written(tmp_path / "data.json", text))
    assert "NLL is not finite for Source." in again.sections[0].notes()


def test_every_table_says_the_protocol(folder: Path) -> None:
    (section,) = load(folder).sections
    line = protocol_line(section.manifest)
    assert "severity 5, first 240 images of each domain, batches of 40, answers before the update" in line
    assert line.endswith("checkpoint cdcdcdcdcdcd.")
    assert all(line in table.notes for table in tables(section, paper=False))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"visits": 10}, "10 visits of every domain"), ({"label_correlation": 0.1}, "labels in runs (Dirichlet 0.1)"),
     ({"after": True}, "answers after the update"), ({"reset_per_domain": True}, "every method reset"),
     ({"shuffle": True}, "images shuffled"), ({"rate": 0.5, "rate_source_ms": 10.0}, "a batch every 20 ms (0.5 x"),
     ({"stream_seed": 3}, "stream seed 3"), ({"severity": 3}, "severity 3"), ({"frames": 4}, "frames 4"),
     ({"protocol": "table1"}, "Protocol table1:")],
)  # fmt: skip
def test_protocols_differ_in_their_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    plain = {"stream": "continual", "severity": 5, "images": 240, "batch_size": 40}
    assert said in protocol_line(plain | change)
    assert said not in protocol_line(plain)


@pytest.mark.parametrize("change", [{"after": True}, {"reset_per_domain": True}, {"rate": 1.0, "rate_source_ms": 9.0}])
def test_other_protocols_are_other_tables(change: dict[str, Any], tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ("source", "bn"), batches=1, n=5, manifest=more)
            for name, more in (("a", {}), ("b", change))]  # fmt: skip
    assert len(load(*runs).sections) == 2


def test_rows_of_other_orders_are_said(tmp_path: Path) -> None:
    orders = [("1", ("fog", "snow")), ("2", ("snow", "fog"))]
    write_run(tmp_path / "a", ("source",), batches=1, n=5, orders=orders)
    write_run(tmp_path / "b", ("bn",), batches=1, n=5, orders=orders[:1])
    (section,) = load(tmp_path / "a", tmp_path / "b").sections
    assert "The rows were not all run over the same orders: see the orders and seeds of each." in section.notes()


def test_the_verdict_says_what_won_by_how_much_and_at_what_cost(folder: Path) -> None:
    (section,) = load(folder).sections
    best, second = sorted(section.rows, key=lambda row: row.stat("error").mean)[:2]
    text = verdict(section)
    found = difference(best, second, "error")
    assert text.startswith(f"Lowest error: {best.label}, {100 * best.stat('error').mean:.2f} %")
    assert f"Difference to {second.label}: −{abs(100 * found.mean):.2f} points [" in text
    assert f"over {found.n} pairs of runs" in text
    assert f"{best.label} {1000 * best.seconds:.1f}" in text


def test_batches_that_were_missed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("bn",), batches=4, n=5, manifest={"rate": 1.0, "rate_source_ms": 5.0})
    file = run / "jobs/bn-standard-15-0/records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for n, line in enumerate(lines):
        line["learned"], line["seconds"] = n % 4 == 0, 1.0 if n % 4 == 0 else 0.001
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = load(run).sections
    assert section.rows[0].learned_share == 0.25
    assert section.rows[0].seconds == 1.0          # of what was learned from
    assert cost_table(section).lines[0].cells[-1].text == "25.0 %"
    assert "25.0 %" in [cell.text for cell in metric_table(section).lines[0].cells]
