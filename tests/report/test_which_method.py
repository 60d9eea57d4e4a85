"""The numbers of the guide are those of its data."""

import re
from pathlib import Path

from petal.methods import METHODS
from petal.report import load

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = ("batch-64-384", "dirichlet-0.1-384", "batch-10-100", "batch-1-40", "recurring-10-50")


def test_every_error_is_that_of_the_data() -> None:
    sections = {s.manifest["protocol"]: s for s in load(DOCS / "results/data/which-method.json").sections}
    text = (DOCS / "guides/which-method.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| `[^`]+` \| [^|]+ \| \S+ \|", line)]
    found = {cells[0].strip(" `"): [cell.strip(" *") for cell in cells[2:]] for cells in lines if len(cells) == 7}
    for name, cells in found.items():
        for column, cell in zip(COLUMNS, cells, strict=True):
            row = next((row for row in sections[column].rows if row.id == name), None)
            assert cell == ("–" if row is None else f"{100 * row.stat('error').mean:.1f}"), (name, column)
    assert len(found) > 25
    assert set(METHODS) - set(found) <= {"memo"}
