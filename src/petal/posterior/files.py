"""Posteriors as safetensors files: tensors by group and name, everything else as metadata."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from petal._files import write_tensors
from petal.errors import PosteriorError


def write(
    path: str | os.PathLike[str], form: str, groups: Mapping[str, Mapping[str, Tensor]], about: Mapping[str, Any]
) -> None:
    """Write tensors GROUP.NAME, and the rest as metadata; the file appears whole or not at all."""
    tensors = {f"{kind}.{name}": v for kind, values in groups.items() for name, v in values.items()}
    metadata = {"format": form} | {key: json.dumps(value) for key, value in about.items()}
    try:
        write_tensors(path, tensors, metadata)
    except (OSError, SafetensorError) as error:  # safetensors reports a folder it cannot write to as its own
        raise PosteriorError(f"cannot write the posterior to {path}: {error}") from error


def format_of(path: str | os.PathLike[str]) -> str | None:
    """What the file says that it is."""
    with _opened(path) as file:
        return (file.metadata() or {}).get("format")


def read(
    path: str | os.PathLike[str], form: str, kinds: tuple[str, ...]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The groups of tensors of these `kinds`, and the metadata. Another `form`, or a tensor of no group, is refused."""
    groups: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    with _opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != form:
            raise PosteriorError(f"{path} is not a petal posterior: its format is {metadata.get('format')!r}")
        for key in file.keys():
            kind, _, name = key.partition(".")
            if kind not in groups or not name:
                raise PosteriorError(f"{path} holds a tensor that is no part of a posterior: {key!r}")
            groups[kind][name] = file.get_tensor(key)
        return groups, {key: json.loads(value) for key, value in metadata.items() if key != "format"}


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except PosteriorError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise PosteriorError(f"cannot read a posterior from {path}: {error}") from error
