"""Where numbers come from: the versions that computed them and the files that went in."""

import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from petal._version import __version__


def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    out = {"petal": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return out | {"numpy": np.__version__, "platform": platform.platform()}


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(path: str | Path | None) -> dict[str, Any]:
    """A file's path and hash."""
    if path is None:
        return {}
    path = Path(path)
    return {"path": str(path), "sha256": file_hash(path)} if path.is_file() else {"path": str(path)}
