"""The pages of results are what `petal report` makes of their data."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from petal.cli import app
from petal.report import Drawing

ROOT = Path(__file__).parents[2] / "docs" / "results"
PAGES = {"results.md": "cifar10.json"}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_made_of_its_data(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawing, "render", lambda self, kind="png": b"")     # only their names and captions count
    command = ["report", str(ROOT / "data" / PAGES[page]), "--paper", "--out", str(tmp_path / page), "--figures",
               str(tmp_path / "images")]  # fmt: skip
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    text = (ROOT / page).read_text(encoding="utf-8")
    assert (tmp_path / page).read_text(encoding="utf-8") == text
    pictures = re.findall(r"\]\((images/[^)]+)\)", text)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
