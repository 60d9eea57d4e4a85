import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from petal.data import digits
from recipes.source import make_source
from serve.running import Running


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits network and its posterior, as the demo makes them, but in a second."""
    return make_source(tmp_path_factory.mktemp("source"))


def with_source(folder: Path, source: Path) -> Path:
    shutil.copytree(source, folder / "source", dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def server(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that leave it in order; limits are small so that they can be met."""
    folder = with_source(tmp_path_factory.mktemp("server"), source)
    options = ["--set", "petal.views=2", "--snapshot-every", "5", "--compare-seconds", "0", "--read-seconds", "3"]
    options += ["--no-small-batch"]                 # every request is learned from, not every sixty-fourth image
    with Running(folder, [*options, "--max-body", "1500000", "--max-pixels", "100000", "--queue", "50"]) as one:
        yield one


@pytest.fixture
def fresh_folder(tmp_path: Path, source: Path) -> Path:
    return with_source(tmp_path / "serve", source)


@pytest.fixture(scope="session")
def x() -> NDArray[np.float32]:
    """Clean digits, float32 [24, 3, 32, 32]."""
    out: NDArray[np.float32] = digits("test").batch(range(24))[0].numpy()
    return out
