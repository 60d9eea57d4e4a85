"""What is collected on a GPU machine that has the core's dependencies and pytest alone: `pytest -m gpu`."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, leave out files that import what is not installed, and doctests, which need no GPU."""
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    if "src" in collection_path.relative_to(config.rootpath).parts:
        return True
    return bool(missing(collection_path)) or None


def missing(path: Path, seen: frozenset[Path] = frozenset()) -> list[str]:
    """The packages that a file imports at its top, or test modules that it imports, and that are not installed."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            helper = Path(__file__).with_name("tests") / f"{name.replace('.', '/')}.py"
            if name.startswith("petal.serve") and find_spec("kserve") is None:
                found.append("kserve")
            elif helper.is_file() and helper not in seen:
                found += missing(helper, seen | {path, helper})
            elif not helper.is_file() and find_spec(name.partition(".")[0]) is None:
                found.append(name)
    return found
