"""Records as a frame and as a Parquet file, against the lines of the files themselves."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from petal import ConfigError, DataError, report
from petal.cli import app
from report.fakes import write_run

pd = pytest.importorskip("pandas")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", ["source", "cotta"], seeds=[0, 1], unfinished=["cotta-standard-15-1"])


def lines(folder: Path) -> dict[str, list[dict]]:
    return {p.parent.name: [json.loads(line) for line in p.read_text().splitlines()] for p in folder.glob("jobs/*/*.jsonl")}


def test_a_row_for_each_batch_of_each_job(folder: Path) -> None:
    frame, wanted = report.to_frame(report.load(folder)), lines(folder)
    assert len(frame) == sum(map(len, wanted.values()))
    for job, records in wanted.items():
        mine = frame[frame.job == job]
        for name in ("position", "domain", "severity", "n", "error", "nll", "brier", "confidence", "entropy", "seconds",
                     "restored", "views_used"):  # fmt: skip
            assert list(mine[name]) == [r[name] for r in records], name
        assert set(mine.row) == {records[0]["row"]}
        assert set(mine.seed) == {str(records[0]["seed"])}
    assert set(frame[~frame.finished].job) == {"cotta-standard-15-1"}
    assert set(frame.label) == {"Source", "CoTTA"}
    assert set(frame.run) == {"run"}
    assert np.isnan(frame[frame.row == "source"].distance).all()


def test_parquet(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    result = CliRunner().invoke(app, ["report", str(folder), "--format", "parquet"])
    assert result.exit_code == 0, result.output
    assert "records.parquet" in result.output
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "records.parquet"), report.to_frame(report.load(folder)))
    out = folder / "deep" / "er.parquet"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(out)]).exit_code == 0
    assert len(pd.read_parquet(out, columns=["error"])) == len(report.to_frame(report.load(folder)))
    with pytest.raises(DataError, match=r"x\.parquet cannot be written"):
        report.write_parquet(report.load(folder), folder / "manifest.json" / "x.parquet")


@pytest.mark.parametrize(("package", "what"), [("pandas", "a frame"), ("pyarrow", "a Parquet file")])
def test_an_absent_package_is_named_with_what_to_install(
    folder: Path, package: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{what} needs {package}: pip install {package}, or 'petal-tta\[frames\]'"):
        report.write_parquet(report.load(folder), folder / "x.parquet")
    assert not (folder / "x.parquet").exists()
