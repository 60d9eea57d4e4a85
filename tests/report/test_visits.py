"""Recurring streams: error by visit as a table, as a figure and as data, and what the guard said."""

import json
from pathlib import Path

import numpy as np
import pytest

from petal.report import draw, load, markdown, tables, to_json

from .fakes import DOMAINS, ROWS, record, write_run

VISITS = 3


@pytest.fixture
def recurring(tmp_path: Path) -> Path:
    """PETAL, whose error falls from visit to visit, and BN, with a guard around the former that raised two alarms."""
    folder = write_run(tmp_path / "run", ["bn", "petal-fim"], manifest={"stream": "recurring", "visits": VISITS})
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["jobs"][1]["options"]["guard"] = {"policy": "rollback"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for job in manifest["jobs"]:
        rng = np.random.default_rng(1)
        lines = []
        for visit in range(VISITS):
            for domain in DOMAINS:
                error = ROWS[job["row"]][3] - (0.05 * visit if job["row"] == "petal-fim" else 0.0)
                line = record(rng, len(lines), domain, 5, 100, error) | {"visit": visit}
                if job["row"] == "petal-fim":
                    line["guard"] = {"frozen": False, "alarms": min(visit, 2)}
                lines.append(line)
        place = folder / "jobs" / job["id"]
        (place / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (place / "job.json").write_text(json.dumps({"status": "done", "batches": len(lines)}))
    return folder


def by_hand(folder: Path, row: str) -> list[float]:
    file = next(folder.glob(f"jobs/{row}-*/records.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [float(np.mean([r["error"] for r in lines if r["visit"] == v])) for v in range(VISITS)]


def test_table_by_visit(recurring: Path) -> None:
    section = load(recurring).sections[0]
    table = next(table for table in tables(section) if table.name.endswith("visits"))
    assert table.columns == ("1", "2", "3", "Mean")
    for line, row in zip(table.lines, ("bn", "petal-fim"), strict=True):
        errors = by_hand(recurring, row)
        assert [cell.text for cell in line.cells[:3]] == [f"{100 * e:.2f}" for e in errors]
        assert line.cells[3].text == f"{100 * np.mean(errors):.2f}"
    assert "by visit" in markdown(load(recurring))
    notes = section.notes()
    assert any("guard of PETAL (FIM) raised 2 alarms" in note for note in notes)


def test_figure_by_visit(recurring: Path) -> None:
    drawing = next(d for d in draw(load(recurring).sections[0]) if d.name == "visits")
    axes = drawing.figure.axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3]] * 2
    assert list(axes.lines[1].get_ydata()) == pytest.approx([100 * e for e in by_hand(recurring, "petal-fim")])
    first, last = (100 * e for e in (by_hand(recurring, "petal-fim")[0], by_hand(recurring, "petal-fim")[-1]))
    assert f"{first:.2f} to {last:.2f}" in drawing.caption


def test_data_by_visit(recurring: Path) -> None:
    rows = json.loads(to_json(load(recurring)))["sections"][0]["rows"]
    assert [v["mean"] for v in rows[1]["by_visit"]["error"]] == pytest.approx(by_hand(recurring, "petal-fim"))
    assert [row["alarms"] for row in rows] == [None, 2]


def test_a_stream_that_does_not_recur_has_none_of_it(tmp_path: Path) -> None:
    section = load(write_run(tmp_path / "run", ["bn"])).sections[0]
    assert section.visits == 1
    assert not any("visit" in table.title for table in tables(section))
