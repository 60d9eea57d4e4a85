"""Runs that saw other images stand in different tables."""

from pathlib import Path

import pytest

from petal.report import load
from report.fakes import write_run


@pytest.mark.parametrize(
    "change",
    [{"stream": "recurring"}, {"stream_seed": 1}, {"shuffle": True}, {"images": 100}, {"visits": 2},
     {"label_correlation": 0.1}, {"network": "wrn-16-1"}],
)  # fmt: skip
def test_another_stream_is_another_table(tmp_path: Path, change: dict[str, object]) -> None:
    whole = {"stream": "continual", "stream_seed": 0, "visits": None, "label_correlation": None, "network": "wrn-28-10"}
    runs = [write_run(tmp_path / "a", ("source",), batches=1, n=5, manifest=whole),
            write_run(tmp_path / "b", ("bn",), batches=1, n=5, manifest=whole | change)]  # fmt: skip
    assert [len(section.rows) for section in load(*runs).sections] == [1, 1]
    same = write_run(tmp_path / "c", ("bn",), batches=1, n=5, manifest=whole)
    assert [len(section.rows) for section in load(runs[0], same).sections] == [2]
