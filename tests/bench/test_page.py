"""The page of measurements: what stands in it is what was measured."""

import json
from pathlib import Path

import pytest
from PIL import Image

from petal.bench import page
from petal.errors import DataError


def row(
    engine: str = "auto", views: int = 32, batch: int = 200, gate: str = "open", ms: float = 200.0, **more: object
) -> dict:
    return {
        "method": "petal", "engine": engine, "network": "wrn-28-10", "batch": batch, "views": views, "gate": gate,
        "device": "some device", "batches": 30, "ms": ms, "fastest": ms - 1, "slowest": ms + 2, "warmup_seconds": 1.0,
        "images_per_second": batch / ms * 1e3, "tflop": 72.0, "tflop_per_second": 360.0, "matrix_share": 0.45,
        "peak_mib": 4000.0, "parts": {}, **more,
    }  # fmt: skip


def write(path: Path, rows: list[dict], command: str = "petal bench steps", **more: str) -> Path:
    path.write_text(json.dumps({"bench": "steps", "command": command, "torch": "2.13.0", "rows": rows, **more}))
    return path


def test_engines_side_by_side_and_the_command(tmp_path: Path) -> None:
    rows = [row("eager", ms=600.0, peak_mib=5000.0), row(ms=200.0), row(gate="closed", ms=27.04)]
    files = [write(tmp_path / "a.json", rows[:2], "petal bench steps --views 32"), write(tmp_path / "b.json", rows[2:])]
    page.write_page(files, tmp_path / "p.md")
    text = (tmp_path / "p.md").read_text()
    assert "## some device, torch 2.13.0" in text
    assert "petal bench steps --views 32\npetal bench steps\n" in text
    line = "| petal, wrn-28-10, batch 200, K 32 open | 600.0 | 200.0 | 3.0 | 199.0 to 202.0 | 1,000 | 45% | 5,000 | 4,000 |"
    assert line in text
    assert "K 32 closed |  | 27.0 |  |" in text


def test_limits_share_the_products_out_by_forward_passes() -> None:
    parts = {"source": 5.0, "teacher on views": 160.0, "student": 16.0, "parameter pass": 1.0}
    limit = page.limits(row(ms=200.0, matrix_share=0.45, parts=parts))
    assert limit == pytest.approx({"source": 2.5, "teacher on views": 80.0, "student": 7.5})  # 90 ms for 36 forwards
    parts = {"source": 5.0, "teacher": 5.0, "student": 16.0}
    closed = page.limits(row(gate="closed", ms=27.0, matrix_share=0.5, parts=parts))
    assert closed == pytest.approx({"source": 2.7, "teacher": 2.7, "student": 8.1})


def test_figures_where_there_are_points(tmp_path: Path) -> None:
    rows = [row(e, views=k, ms=10.0 + k) for e in ("eager", "auto") for k in (4, 8, 16)]
    rows += [row("auto", batch=b, ms=float(b)) for b in (1, 10, 50)]
    written = page.write_page([write(tmp_path / "a.json", rows)], tmp_path / "p.md")
    assert [path.name for path in written] == ["p.md", "performance-views.png", "performance-batch.png"]
    assert all(Image.open(path).size[0] > 600 for path in written[1:])
    text = (tmp_path / "p.md").read_text()
    assert "fast, views K 8: 18.0 ms" in text  # for those who cannot see the figure


def test_steps_of_another_version_are_marked_and_drawn_apart(tmp_path: Path) -> None:
    now = write(tmp_path / "now.json", [row(batch=b, ms=b / 2) for b in (200, 50)])
    old = write(tmp_path / "old.json", [row(batch=b, ms=b + 4.0) for b in (50, 10, 1)], version="earlier version")
    page.write_page([now, old], tmp_path / "p.md")
    text = (tmp_path / "p.md").read_text()
    assert "| petal, wrn-28-10, batch 50, K 32 open |  | 25.0 |" in text
    assert "| petal, wrn-28-10, batch 50, K 32 open (earlier version) |  | 54.0 |" in text
    (drawing,) = page.drawings([r for file in (now, old) for r in page.read(file).rows])
    (axes,) = drawing.figure.axes
    lines = {line.get_label(): dict(line.get_xydata()) for line in axes.get_lines()}
    assert lines == {"fast": {50: 25.0, 200: 100.0}, "fast (earlier version)": {1: 5.0, 10: 14.0, 50: 54.0}}
    assert len({line.get_linestyle() for line in axes.get_lines()}) == 2
    assert "fast (earlier version), images per batch 10: 14.0 ms" in drawing.caption


def test_words_above_the_mark_stay(tmp_path: Path) -> None:
    out = tmp_path / "p.md"
    file = write(tmp_path / "a.json", [row()])
    page.write_page([file], out)
    first = out.read_text()
    out.write_text("# Mine\n\nWords.\n\n" + page.MARK + "\nold\n")
    page.write_page([file], out)
    assert out.read_text() == "# Mine\n\nWords.\n\n" + page.MARK + first.partition(page.MARK)[2]
    out.write_text("nothing of ours\n")
    with pytest.raises(DataError, match="has no line"):
        page.write_page([file], out)
    assert out.read_text() == "nothing of ours\n"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"bench": "steps"}', '{"bench": "corruptions", "command": "", "torch": "", "rows": [1]}']
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a\.json"):
        page.write_page([tmp_path / "a.json"], tmp_path / "p.md")
    assert not (tmp_path / "p.md").exists()
