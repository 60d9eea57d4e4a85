"""Files that appear whole or not at all, and folders for one process at a time."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from petal.errors import ConfigError, StorageError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the same folder that takes the place of `path` if the block ends well, synced to disk.

    If the block fails, `path` is as it was and nothing is left behind. Whoever else writes the same path at the same time
    has a temporary file of their own; the last to finish stays. The file has the usual permissions, whatever those of the
    temporary one were: safetensors makes its files readable to their owner only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text(), len(os.listdir(folder))
    ('whole', 1)
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def left_behind(folder: Path, name: str = "*") -> Iterator[Path]:
    """What processes that were killed while they wrote files of this name left, in a folder that nobody else writes to."""
    yield from folder.glob(f".{name}.tmp")
    yield from folder.glob(f".tmp{6 * '[0-9A-Za-z]'}")          # safetensors', before it has that name


@contextmanager
def alone(folder: Path, taken: str | None = None) -> Iterator[None]:
    """No other process has this folder, or a ConfigError with these words. Without words it waits until none has.

    The system lets go of the lock when the process dies, however it does.
    """
    path = folder / ".lock"
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("w"))
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken else 0))
        except OSError as error:
            raise ConfigError(taken or f"{path} cannot be locked: {error.strerror}") from error
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """A folder, unless it is there."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, content: Any) -> None:
    """A JSON file that appears whole or not at all."""
    with writing(path), replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
