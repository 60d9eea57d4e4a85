"""The tutorials run as they stand, each in a fresh kernel, and come out as they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("nbclient", reason="nbclient is not installed: pip install '.[dev]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install '.[dev]'")
import nbformat

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
SAID = {
    "adapt-your-network": ["continues to the bit: True", "back at the start: True", "as it was    adapted"],
    "compare-methods": ["| BN Adapt |", "| petal.adapt |"],
    "write-a-method": [
        "reset does not put back `usual`", "no undeclared state [batch norm, plain]: `usual` changes while adapting",
        "float64 [batch norm, plain]", "weights not finite [batch norm, engine]"],
    "put-it-in-service": [
        "adapted: False", "after the rollback: 4", "petal_ready 1.0", "exit status: 0", "a checkpoint is there: True"],
}  # fmt: skip


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools" / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell of code prints or shows as text."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    texts = [[o.get("text", "") or "".join(o.get("data", {}).get("text/markdown", "")) for o in found] for found in outputs]
    return ["".join(found) for found in texts]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    texts = shown(tool().run(path, tmp_path))
    everything = "\n".join(texts)
    for words in SAID[path.stem]:
        assert words in everything
    if path.stem == "write-a-method":
        first, second = (text for text in texts if "checks passed" in text)
        assert len(first.splitlines()) > 1
        assert len(second.splitlines()) == 1         # nothing is found any more
    if path.stem in ("adapt-your-network", "put-it-in-service"):
        before, after = errors(path.stem, everything)
        assert after < before


def errors(name: str, text: str) -> tuple[float, float]:
    """The error over the stream before and with adaptation."""
    start = "all " if name.startswith("adapt") else "error: "
    line = [line for line in text.splitlines() if line.startswith(start)][-1]
    found = [float(word[:-1]) for word in line.split() if word.endswith("%")]
    return (found[0], found[1]) if start == "all " else (found[1], found[0])


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_kept_with_what_it_prints(path: Path) -> None:
    """The site shows this; it is small, and from one run from top to bottom."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    for words in SAID[path.stem]:
        assert words in "\n".join(shown(notebook))
    assert path.stat().st_size < 100_000


def test_all_four_are_here() -> None:
    assert {path.stem for path in TUTORIALS} == set(SAID)
