"""Rows that use the order of the images are marked wherever they stand beside rows that do not."""

import json
from pathlib import Path

import pytest

from petal.report import latex, load, markdown, tables

from .fakes import write_run


def _with_order(tmp_path: Path, **options: object) -> Path:
    folder = write_run(tmp_path / "run", ["bn", "petal-fim"])
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["jobs"][1]["options"]["order"] = options
    manifest["jobs"][1]["label"] = "PETAL + order"
    path.write_text(json.dumps(manifest))
    return folder


def test_rows_with_order_are_marked_and_the_mark_explained(tmp_path: Path) -> None:
    report = load(_with_order(tmp_path, streams=64))
    (section,) = report.sections
    own = [table for table in tables(section, paper=True) if not table.name.startswith(f"{section.slug}-paper-table")]
    assert len(own) > 3
    for table in own:
        labels = [line.label for line in table.lines]
        assert labels == ["BN Adapt", "PETAL + order†"] or (labels == ["BN Adapt"] and "PETAL + order†" in table.title)
        assert any(note.startswith("† also uses the order") for note in table.notes)
    assert "PETAL + order†" in markdown(report)
    assert r"PETAL + order\dag{}" in latex(report)


@pytest.mark.parametrize("options", [None, {"shuffled": True}])
def test_others_are_not(tmp_path: Path, options: dict[str, object] | None) -> None:
    folder = write_run(tmp_path / "run", ["bn", "petal-fim"]) if options is None else _with_order(tmp_path, **options)
    assert "†" not in markdown(load(folder))
