from pathlib import Path

import pytest

from .fakes import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight rows; three seeds for those that draw random numbers; the last of PETAL (FIM) unfinished."""
    unfinished = ("petal-fim-standard-15-2",)
    return write_run(tmp_path_factory.mktemp("runs") / "run", seeds=(0, 1, 2), unfinished=unfinished, samples=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two rows, one seed: to be damaged."""
    return write_run(tmp_path / "small", ("source", "petal-fim"), batches=2, n=10)
