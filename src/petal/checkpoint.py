"""The whole state of an adapter on disk: safetensors and JSON only, checksummed, written whole or not at all.

`save` and `load` are for one file; `Checkpoints` keeps two generations in a folder, so that a damaged or half-written
newest one never costs more than the work since the one before it. A checkpoint says which source it belongs to by a
fingerprint of the source weights (and of the posterior); it is refused by an adapter that started anywhere else.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from petal._files import replacing
from petal._version import __version__
from petal.errors import PetalError
from petal.methods import Adapter, Wrapper

FORMAT = "petal-checkpoint-1"

PathLike = str | os.PathLike[str]


class CheckpointError(PetalError, ValueError):
    """A checkpoint that cannot be written, or does not belong to the adapter it was to be loaded into."""


class DamagedCheckpoint(CheckpointError):
    """A file that is no checkpoint, or no longer the one that was written."""


_fingerprints: WeakKeyDictionary[Adapter, str] = WeakKeyDictionary()


def fingerprint(adapter: Adapter) -> str:
    """A hash of what the adapter started from and never changes: source weights, buffers, posterior.

    >>> from petal import Source
    >>> model = torch.nn.Linear(2, 2)
    >>> fingerprint(Source(model)) == fingerprint(Source(model)), len(fingerprint(Source(model)))
    (True, 64)
    """
    if adapter not in _fingerprints:
        _fingerprints[adapter] = digest(_source_tensors(adapter))
    return _fingerprints[adapter]


def save(adapter: Adapter, path: PathLike, extra: Mapping[str, Any] | None = None) -> None:
    """Write the adapter's whole state, and `extra` (anything JSON can hold, such as a stream's position) beside it.

    The file appears whole or not at all, and is on the disk when this returns. Nothing of the adapter changes.
    """
    state = {key: value.contiguous().cpu() for key, value in adapter.state_dict().items()}
    text = json.dumps(
        {
            "method": adapter.kind,
            "petal": __version__,
            "torch": torch.__version__,
            "device": adapter.device.type,
            "source": fingerprint(adapter),
            "extra": dict(extra or {}),
        }
    )
    try:
        with replacing(path) as temporary:
            save_file(state, temporary, metadata={"format": FORMAT, "about": text, "sha256": digest(state, text)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint to {path}: {error}") from error


def load(adapter: Adapter, path: PathLike) -> dict[str, Any]:
    """Continue from what `save` wrote, exactly; returns its `extra`.

    A damaged file, another kind of file, or a checkpoint of another method, network, source or posterior is refused
    with the reason, and the adapter stays as it was.
    """
    about, state = _read(Path(path))
    _check_belongs(adapter, about, state, path)
    try:
        adapter.load_state_dict(state)
    except PetalError as error:
        raise CheckpointError(f"{path}: {error}") from error
    extra: dict[str, Any] = about["extra"]
    return extra


class Checkpoints:
    """The checkpoints of one run in a folder: numbered files, of which the newest two stay."""

    def __init__(self, folder: PathLike, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """The files there are, the newest first."""
        found = {int(m[1]): p for p in self.folder.glob("checkpoint-*.safetensors") if (m := _NUMBERED.fullmatch(p.name))}
        return [found[number] for number in sorted(found, reverse=True)]

    def save(self, adapter: Adapter, extra: Mapping[str, Any] | None = None) -> Path:
        """Write the next generation, then remove all but the newest `keep`."""
        before = self.paths()
        number = int(_number(before[0])) + 1 if before else 1
        path = self.folder / f"checkpoint-{number}.safetensors"
        save(adapter, path, extra)
        for old in before[self.keep - 1 :]:
            with suppress(OSError):
                old.unlink()
        return path

    def latest(self) -> Path | None:
        """The newest file that is undamaged, or None."""
        for path in self.paths():
            with suppress(DamagedCheckpoint):
                _read(path)
                return path
        return None

    def load_latest(
        self, adapter: Adapter, accept: Callable[[dict[str, Any]], bool] = lambda extra: True
    ) -> dict[str, Any] | None:
        """Continue from the newest undamaged file whose `extra` is accepted; None, and nothing changed, without one.

        A file that is whole but belongs to another adapter is an error: falling back would hide a mistake.
        """
        for path in self.paths():
            try:
                about, _ = _read(path)
            except DamagedCheckpoint:
                continue
            if accept(about["extra"]):
                return load(adapter, path)
        return None

    def clear(self) -> None:
        """Remove them all, and what an interrupted write left."""
        for path in [*self.paths(), *self.folder.glob(".checkpoint-*.tmp")]:
            with suppress(OSError):
                path.unlink()


_NUMBERED = re.compile(r"checkpoint-(\d+)\.safetensors")


def _number(path: Path) -> str:
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None
    return match[1]


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """SHA-256 over names, types, shapes and values, in the order of the names."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous().cpu()
        sha.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _source_tensors(adapter: Adapter) -> dict[str, Tensor]:
    source = getattr(adapter, "source", None)
    network = source if isinstance(source, torch.nn.Module) else adapter.model
    initial: Mapping[str, Tensor] = {} if network is source else getattr(adapter, "_initial", {})
    moving = set() if network is source else adapter.adapted.keys() - initial.keys()
    tensors = {f"parameter.{k}": initial.get(k, p) for k, p in network.named_parameters() if k not in moving}
    tensors |= {f"buffer.{k}": b for k, b in network.named_buffers()}
    posterior = getattr(adapter, "posterior", None)
    if posterior is not None:
        tensors |= {f"var.{k}": v for k, v in posterior.var.items()}
        tensors["damping"] = torch.tensor(posterior.damping, dtype=torch.float64)
    return tensors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is said about the state, and the state; everything in the file is covered by its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DamagedCheckpoint(f"{path} is not a petal checkpoint: its format is {metadata.get('format')!r}")
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {path}: there is no such file") from error
    except DamagedCheckpoint:
        raise
    except Exception as error:  # a damaged header can fail in any way; nothing in it is ever run
        raise DamagedCheckpoint(f"{path} is damaged, or no checkpoint: {error}") from error
    if digest(state, metadata.get("about", "")) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path} is damaged: its content does not have the checksum it was written with")
    try:
        about: dict[str, Any] = json.loads(metadata["about"])
        if not {"method", "device", "source", "extra"} <= about.keys():
            raise ValueError("it does not say what it is a checkpoint of")
    except (KeyError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    return about, state


def _check_belongs(adapter: Adapter, about: Mapping[str, Any], state: Mapping[str, Tensor], path: PathLike) -> None:
    mine = adapter.kind
    if about["method"] != mine:
        raise CheckpointError(f"{path} is a checkpoint of {about['method']}, and this adapter is {mine}")
    if about["device"] != adapter.device.type:
        raise CheckpointError(
            f"{path} was written on {about['device']} and this adapter is on {adapter.device.type}: random numbers cannot "
            "continue on another kind of device"
        )
    current = adapter.state_dict()
    plain = not isinstance(adapter, Wrapper)        # what a wrapper keeps, such as a window, may grow
    wrong = [
        f"{key!r} is {state[key].dtype} {list(state[key].shape)} instead of {value.dtype} {list(value.shape)}"
        for key, value in current.items()
        if key in state and (state[key].dtype != value.dtype or (plain and state[key].shape != value.shape))
    ]
    if wrong:
        raise CheckpointError(f"{path} is a checkpoint of another network: {'; '.join(wrong[:5])}")
    if about["source"] != fingerprint(adapter):
        what = "weights or posterior" if hasattr(adapter, "posterior") else "weights"
        raise CheckpointError(
            f"{path} belongs to other source {what} (fingerprint {about['source'][:12]}, this adapter's is "
            f"{fingerprint(adapter)[:12]}): give the ones it was started with"
        )
