"""What the package leans on."""

import ast
import sys
from pathlib import Path

import pytest

from petal import models

FILES = sorted(Path(models.__file__).parent.glob("*.py"))
ALLOWED = {"torch", "numpy", "safetensors", *sys.stdlib_module_names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_imports_are_few(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module or "")
    for name in imported:
        assert name.partition(".")[0] in ALLOWED or name.startswith(("petal.errors", "petal.models")), name


def test_every_public_name_is_there() -> None:
    assert len(FILES) > 10
    assert sorted(set(models.__all__)) == sorted(models.__all__)
    assert all(hasattr(models, name) for name in models.__all__)
