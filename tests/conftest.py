import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the runner uses a process for each core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
        if "real_data" in item.keywords and not os.environ.get("PETAL_REAL_DATA"):
            item.add_marker(pytest.mark.skip(reason="PETAL_REAL_DATA names no folder"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    return Path(os.environ["PETAL_REAL_DATA"])
