from pathlib import Path

import pytest

from recipes.source import make_source


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network for the digits and its posterior, barely trained."""
    return make_source(tmp_path_factory.mktemp("source"))
