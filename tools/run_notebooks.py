"""Run the tutorials in fresh kernels and keep what they print and draw, which is what the site shows.

    python tools/run_notebooks.py [NOTEBOOK ...]
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"


def run(path: Path, folder: str | Path) -> nbformat.NotebookNode:
    """The notebook as it is after all its cells, which run in the folder. A cell that fails is an error."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, startup_timeout=600, record_timing=False, resources=where).execute()
    return notebook


def main(names: list[str]) -> None:
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, folder)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                texts = [o for o in cell.outputs if o.output_type != "stream" or o.name == "stdout"]
                cell.outputs = join(texts)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s")


def join(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Pieces of printed text that follow each other, as one, however the kernel cut it."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    main(sys.argv[1:])
