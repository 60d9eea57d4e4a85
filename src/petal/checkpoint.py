"""The whole state of an adapter on disk: safetensors and JSON only, checksummed, written whole or not at all.

`save` and `load` are for one file; `Checkpoints` keeps two generations in a folder and writes them in the background, so
that a step never waits for the disk, and a damaged or half-written newest one never costs more than the work since the
one before it. A checkpoint says which source it belongs to by a fingerprint of the source weights and of the posterior,
which are not stored again; it is refused by an adapter that started anywhere else.
"""

import hashlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from petal._files import left_behind, replacing
from petal._random import PREFIX as RANDOM
from petal._random import random_state, set_random_state
from petal._version import __version__
from petal.errors import ConfigError, PetalError, PetalWarning
from petal.methods import Adapter
from petal.statistics import SourceStatistics

FORMAT = "petal-checkpoint-1"
FILE = "checkpoint-*"

PathLike = str | os.PathLike[str]


class CheckpointError(PetalError, ValueError):
    """A checkpoint that cannot be written, or does not belong to the adapter it was to be loaded into."""


class DamagedCheckpoint(CheckpointError):
    """A file that is no checkpoint, or no longer the one that was written."""


_fingerprints: WeakKeyDictionary[Adapter, str] = WeakKeyDictionary()


def fingerprint(adapter: Adapter) -> str:
    """A hash of what the adapter started from and never changes: source weights, buffers, posterior, source statistics.

    >>> from petal import Source
    >>> model = torch.nn.Linear(2, 2)
    >>> fingerprint(Source(model)) == fingerprint(Source(model)), len(fingerprint(Source(model)))
    (True, 64)
    """
    method = _layers(adapter)[-1]
    if method not in _fingerprints:
        _fingerprints[method] = digest(_source_tensors(method))
    return _fingerprints[method]


def save(adapter: Adapter, path: PathLike, extra: Mapping[str, Any] | None = None) -> None:
    """Write the adapter's whole state, and `extra` (anything JSON can hold, such as a stream's position) with it.

    The state of torch's own random numbers is included, on every device. The file appears whole or not at all, and is on
    the disk when this returns. Nothing of the adapter changes.
    """
    snapshot = _Snapshot.of(adapter, extra)
    write_state(path, snapshot.state, snapshot.about)


def load(adapter: Adapter, path: PathLike) -> dict[str, Any]:
    """Continue from what `save` wrote, exactly, torch's own random numbers included; returns its `extra`.

    A damaged file, another kind of file, or a checkpoint of another method, network, source or posterior is refused
    with the reason, and the adapter stays as it was.
    """
    return _put(adapter, path, *_read(path))


class Checkpoints:
    """The checkpoints of one run in a folder: numbered files, of which the newest `keep` that are whole stay.

    `save` copies the state and returns; a thread writes the copy. If copies come faster than they can be written, the
    newest is written next and those between are left out. A write that fails (a full disk, a folder that became
    read-only or vanished) never stops the caller: the last good file stays, a `PetalWarning` at the next call says what
    happened, once until a write goes well again, and `error` keeps it. `wait` returns when everything is on the disk; as a
    context manager it waits at the end. One process writes to a folder at a time.

    >>> import tempfile
    >>> from petal import Source
    >>> adapter = Source(torch.nn.Linear(2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Checkpoints(folder) as kept:
    ...         kept.save(adapter, {"position": 7})
    ...     kept.load_latest(adapter)
    {'position': 7}
    """

    def __init__(self, folder: PathLike, keep: int = 2) -> None:
        if keep < 2:
            raise ConfigError(f"keep must be at least 2, so that one may be damaged; got {keep}")
        self.folder, self.keep = Path(folder), keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {folder} for checkpoints: {_reason(error)}") from error
        self.error: CheckpointError | None = None   # of the last write, None if it went well
        self.on_write: Callable[[CheckpointError | None], None] | None = None   # called after each write, by its thread
        self.seconds = 0.0                          # that the last write took
        self._damaged: set[Path] = set()
        self._changed = threading.Condition()       # guards all below
        self._pending: _Snapshot | None = None
        self._writing = False
        self._spare: list[dict[str, Tensor]] = []   # host buffers of finished writes
        self._untold: list[CheckpointError] = []
        self._told: set[str] = set()

    def paths(self) -> list[Path]:
        """The files there are, the newest first."""
        found = {int(m[1]): p for p in self.folder.glob("checkpoint-*.safetensors") if (m := _NUMBERED.fullmatch(p.name))}
        return [found[number] for number in sorted(found, reverse=True)]

    def save(self, adapter: Adapter, extra: Mapping[str, Any] | None = None) -> None:
        """Take a copy of the adapter's whole state, to be written as the next generation, and return."""
        self._tell()
        with self._changed:
            buffers = self._spare.pop() if self._spare else {}
        snapshot = _Snapshot.of(adapter, extra, buffers)
        with self._changed:
            if self._pending is not None:
                self._spare.append(self._pending.buffers)
            self._pending = snapshot
            idle, self._writing = not self._writing, True
        if idle:                                    # a thread for as long as there is work: none is left at exit
            try:
                threading.Thread(target=self._write_pending, name="petal-checkpoints").start()
            except RuntimeError:                    # no thread can be started
                self._write_pending()

    def wait(self) -> None:
        """Return when everything given to `save` is on the disk, or could not be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
        self._tell()

    def close(self) -> None:
        """Wait, and free the memory for copies."""
        self.wait()
        self._spare.clear()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def latest(self) -> Path | None:
        """The newest file that is undamaged, or None."""
        return next((path for path, _, _ in self._undamaged()), None)

    def load_latest(
        self, adapter: Adapter, accept: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any] | None:
        """Continue from the newest undamaged file, and return its `extra`; None, and nothing changed, without one.

        `accept` may look at an `extra` and pass its file over. The user is warned of damaged ones. A file that is whole
        but belongs to another adapter is an error: falling back would hide a mistake.
        """
        for path, about, state in self._undamaged():
            if accept is None or accept(about["extra"]):
                return _put(adapter, path, about, state)
        return None

    def clear(self) -> None:
        """Remove all of them, and what an interrupted write left."""
        self.wait()
        _remove([*self.paths(), *left_behind(self.folder, FILE)])
        self._damaged.clear()

    def _undamaged(self) -> Iterator[tuple[Path, dict[str, Any], dict[str, Tensor]]]:
        self.wait()
        for path in self.paths():
            try:
                about, state = _read(path)
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                text = f"{error}; the one before it is taken, if there is one"
                warnings.warn(text, PetalWarning, stacklevel=3)
                continue
            yield path, about, state

    def _write_pending(self) -> None:
        """What the thread does. It touches host memory only: a CUDA graph may be being captured meanwhile."""
        while True:
            with self._changed:
                snapshot, self._pending = self._pending, None
                if snapshot is None:
                    self._writing = False
                    self._changed.notify_all()
                    return
            began = time.monotonic()
            try:
                self._write(snapshot)
                error = None
            except CheckpointError as raised:
                error = raised
            except Exception as raised:             # whatever it is, the caller's work goes on
                error = CheckpointError(f"cannot write a checkpoint to {self.folder}: {raised!r}")
            with self._changed:
                self.error, self.seconds = error, time.monotonic() - began
                self._spare.append(snapshot.buffers)
                if error is None:
                    self._told.clear()
                elif (kind := _kind(error)) not in self._told:
                    self._told.add(kind)
                    self._untold.append(error)
            if self.on_write is not None:
                self.on_write(error)

    def _write(self, snapshot: "_Snapshot") -> None:
        """The next generation; then all but the newest `keep` go, and those that were found damaged."""
        _remove(left_behind(self.folder, FILE))
        before = self.paths()
        number = int(_number(before[0])) + 1 if before else 1
        write_state(self.folder / f"checkpoint-{number}.safetensors", snapshot.state, snapshot.about)
        whole = [path for path in before if path not in self._damaged]
        _remove([*whole[self.keep - 1 :], *self._damaged])
        self._damaged.clear()

    def _tell(self) -> None:
        with self._changed:
            errors, self._untold = self._untold, []
        for error in errors:
            text = f"adaptation goes on without a new checkpoint, and the last good one stays: {error}"
            warnings.warn(text, PetalWarning, stacklevel=3)


@dataclass
class _Snapshot:
    """A copy of an adapter's state in host memory, with what is said about it."""

    state: dict[str, Tensor]
    about: dict[str, Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, adapter: Adapter, extra: Mapping[str, Any] | None, buffers: dict[str, Tensor] | None = None
    ) -> "_Snapshot":
        """The state of this moment; `buffers` of an earlier snapshot of the same adapter are used again."""
        layers = _layers(adapter)
        about = {
            "method": _name(adapter),
            "petal": __version__,
            "torch": torch.__version__,
            "device": layers[-1].device.type,
            "source": fingerprint(adapter),
            "extra": json.loads(_json(dict(extra or {}))),
        }
        buffers = {} if buffers is None else buffers
        return cls(to_host(adapter.state_dict() | random_state(), buffers), about, buffers)


def to_host(state: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in host memory: those on a GPU in page-locked `buffers`, made here if they do not fit.

    Tensors that are in host memory are taken as they are: a state is made of copies.
    """
    out, devices = {}, set()
    for key, value in state.items():
        if value.device.type == "cpu":
            out[key] = value.contiguous()
            continue
        buffer = buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = buffers[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        out[key] = buffer.copy_(value, non_blocking=True)
        devices.add(value.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return out


def write_state(path: PathLike, state: Mapping[str, Tensor], about: Mapping[str, Any], kind: str = FORMAT) -> None:
    """Write tensors and JSON as one checksummed file, which appears whole or not at all and is then on the disk."""
    tensors, text = {key: value.detach().contiguous().cpu() for key, value in state.items()}, _json(about)
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"format": kind, "about": text, "sha256": digest(tensors, text)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint to {path}: {_reason(error)}") from error


def read_state(path: PathLike, kind: str = FORMAT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_state` wrote: JSON, tensors. All of the file is covered by its checksum, and nothing in it is ever run."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {path}: there is no such file") from error
    except Exception as error:  # a damaged header can fail in any way
        raise DamagedCheckpoint(f"{path} is damaged, or no checkpoint: {error}") from error
    if metadata.get("format") != kind:
        raise DamagedCheckpoint(f"{path} is not a petal checkpoint: its format is {metadata.get('format')!r}, not {kind!r}")
    text = metadata.get("about", "")
    if digest(state, text) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path} is damaged: its content does not have the checksum it was written with")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: what it says about itself cannot be read: {error}") from error
    if not isinstance(about, dict):
        raise DamagedCheckpoint(f"{path} is damaged: it does not say what it is")
    return about, state


def _read(path: PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save` wrote: what is said about the state, and the state."""
    about, state = read_state(path)
    said = {"method": str, "device": str, "source": str, "extra": dict}
    if not all(isinstance(about.get(key), kind) for key, kind in said.items()):
        raise DamagedCheckpoint(f"{path} is damaged: it does not say what it is a checkpoint of")
    return about, state


def _put(adapter: Adapter, path: PathLike, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put the adapter and torch's random numbers into a state that was read; all of it or nothing."""
    before = adapter.state_dict()
    _check_belongs(adapter, about, before, state, path)
    generators = random_state()
    try:
        set_random_state(state)
        adapter.load_state_dict({key: value for key, value in state.items() if not key.startswith(RANDOM)})
    except Exception as error:  # what the checks above let through, such as a random state that is none
        set_random_state(generators)
        adapter.load_state_dict(before)
        raise CheckpointError(f"{path}: {error}") from error
    extra: dict[str, Any] = about["extra"]
    return extra


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
    name, network = ("source", source) if isinstance(source, torch.nn.Module) else ("model", adapter.model)
    start = {} if network is source else adapter._start
    moving = set() if network is source else adapter.adapted.keys() - start.keys()      # nobody knows where they started
    own = adapter._given - moving                                                       # not what a method adds to it
    tensors = {f"parameter.{k}": start.get(k, p) for k, p in network.named_parameters() if k in own}
    tensors |= {f"buffer.{k}": adapter._buffers_start.get(f"{name}.{k}", b) for k, b in network.named_buffers()}
    posterior = getattr(adapter, "posterior", None)
    if posterior is not None:
        tensors |= {f"var.{k}": v for k, v in posterior.variance().items()}
        tensors["damping"] = torch.tensor(posterior.damping, dtype=torch.float64)
    statistics = getattr(adapter, "statistics", None)
    if isinstance(statistics, SourceStatistics):
        tensors |= {f"statistics.{k}": v for k, v in statistics.tensors().items()}
    return tensors


def _check_belongs(
    adapter: Adapter, about: Mapping[str, Any], current: Mapping[str, Tensor], state: Mapping[str, Tensor], path: PathLike
) -> None:
    mine, device = _name(adapter), _layers(adapter)[-1].device.type
    if about["method"] != mine:
        raise CheckpointError(f"{path} is a checkpoint of {about['method']}, and this adapter is {mine}")
    if about["device"] != device:
        raise CheckpointError(
            f"{path} was written on {about['device']} and this adapter is on {device}: random numbers cannot "
            "continue on another kind of device"
        )
    plain = len(_layers(adapter)) == 1              # what a wrapper keeps, such as a window, may grow
    wrong = [
        f"{key!r} is {state[key].dtype} {list(state[key].shape)} instead of {value.dtype} {list(value.shape)}"
        for key, value in current.items()
        if key in state and (state[key].dtype != value.dtype or (plain and state[key].shape != value.shape))
    ]
    if wrong:
        raise CheckpointError(f"{path} is a checkpoint of another network: {'; '.join(wrong[:5])}")
    if about["source"] != fingerprint(adapter):
        what = " or ".join(["weights", *(k for k in ("posterior", "statistics") if hasattr(_layers(adapter)[-1], k))])
        raise CheckpointError(
            f"{path} belongs to other source {what} (fingerprint {about['source'][:12]}, this adapter's is "
            f"{fingerprint(adapter)[:12]}): give the ones it was started with"
        )


def _layers(adapter: Any) -> list[Any]:
    """An adapter and what it wraps as `.adapter`, the method itself last."""
    layers = [adapter]
    while (inner := getattr(layers[-1], "adapter", None)) is not None:
        layers.append(inner)
    return layers


def _name(adapter: Adapter) -> str:
    """Petal, or Guard(Petal)."""
    names = [type(layer).__name__ for layer in _layers(adapter)]
    return "(".join(names) + ")" * (len(names) - 1)


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"JSON cannot hold what goes along with the checkpoint: {error}") from error


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _reason(error: Exception) -> str:
    """In few words, the same each time: the name of the temporary file, which is in the message, is not."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _kind(error: CheckpointError) -> str:
    cause = error.__cause__
    return _reason(cause) if isinstance(cause, Exception) else str(error)
