"""The published numbers: consistent with themselves, and set beside the right rows."""

from pathlib import Path

import numpy as np
import pytest

from petal.corruptions import CORRUPTIONS
from petal.report import PUBLISHED, load, paper_tables, published
from petal.report.paper import lookup, paper_name
from petal.report.tables import paper_values

from .fakes import write_run


def test_means_are_those_of_the_columns() -> None:
    """The paper's own mean is that of its fifteen columns, up to the columns it gives with one digit."""
    for table in PUBLISHED[:2]:
        for method, texts in table.by_domain.items():
            assert len(texts) == 15
            mean = np.mean([float(text) for text in texts])
            assert mean == pytest.approx(100 * table.scores[method]["error"].mean, abs=0.04)


def test_known_cells() -> None:
    first, second, gradual, *_ = PUBLISHED
    assert first.scores["PETAL (FIM)"]["error"].std == pytest.approx(0.0004)
    assert first.errors("TENT-continual")["shot_noise"] == pytest.approx(0.206)
    assert second.errors("Source")["jpeg_compression"] == pytest.approx(0.4125)
    assert gradual.scores["CoTTA"]["brier"].text == "0.159 ± 0.003"
    assert gradual.scores["CoTTA"]["brier"].std == pytest.approx(0.003)
    assert published("imagenet")[0].scores["TENT"]["nll"].mean == 3.6076


def test_the_misprinted_table_is_read_as_nll() -> None:
    table, = published("imagenet-3dcc")
    assert table.number == 6
    assert table.scores["TENT"]["nll"].mean == 19.0408
    assert all("brier" not in scores for scores in table.scores.values())
    assert "exceeds 2" in table.remarks[0]


@pytest.mark.parametrize(
    ("row", "label", "expected"),
    [
        ("tent", "TENT-continual", "TENT-continual"),
        ("tent-online", "TENT-online", "TENT-online"),
        ("petal", "PETAL (FIM)", "PETAL (FIM)"),
        ("petal-sres-0.03", "PETAL (S-Res, 0.03)", None),
        ("petal-none", "PETAL (no restore)", None),
        ("mine", "Mine", None),
    ],
)
def test_names(row: str, label: str, expected: str | None) -> None:
    assert paper_name(row, label) == expected


def test_tent_is_tent_continual_in_the_later_tables() -> None:
    assert lookup(PUBLISHED[4], "TENT-continual") == "TENT"
    assert lookup(PUBLISHED[4], "TENT-online") is None
    assert lookup(PUBLISHED[0], "TENT-continual") == "TENT-continual"


def test_difference_is_ours_less_theirs(run: Path) -> None:
    section, = load(run).sections
    table = paper_tables(section)[0]
    assert table.columns == ("Error (%) ours", "Error (%) paper", "Error (%) difference")
    for line in table.lines:
        ours, theirs, difference = (cell.text.replace("−", "-") for cell in line.cells)
        assert float(difference) == pytest.approx(float(ours.split()[0]) - float(theirs.split()[0]), abs=0.011)
        assert difference[0] in "+-"
    assert [line.label for line in table.lines] == [row.label for row in section.rows]
    assert dict(paper_values(section, section.rows[-1]))["error"][0].text == "15.95 (0.04)"


def test_the_papers_table_has_our_domains_in_our_order(run: Path) -> None:
    section, = load(run).sections
    table = paper_tables(section)[1]
    assert table.columns == ("Gaussian", "shot", "fog", "jpeg", "Mean")
    cotta = next(line for line in table.lines if line.label == "CoTTA")
    assert [cell.plain for cell in cotta.cells] == ["23.92", "21.40", "13.16", "17.17", "16.29 (0.02)"]
    assert [cell.best for cell in table.lines[-1].cells] == [True, False, True, True, True]


def test_cifar100_has_errors_of_one_table_and_the_rest_of_another(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("cotta",), batches=1, n=10, manifest={"recipe": "cifar100", "severity": 3})
    section, = load(run).sections
    found = paper_values(section, section.rows[0])
    assert {name: number for name, (_, number) in found.items()} == {"error": 2, "nll": 4, "brier": 4}
    table = paper_tables(section)[0]
    assert "Tables 2 and 4" in table.title
    assert any("severity 3" in note for note in table.notes)


def test_no_paper_for_a_benchmark_of_our_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("cotta",), batches=1, n=10, manifest={"recipe": "digits"})
    assert paper_tables(load(run).sections[0]) == []


def test_every_corruption_has_a_column() -> None:
    assert list(PUBLISHED[0].errors("CoTTA")) == list(CORRUPTIONS)
