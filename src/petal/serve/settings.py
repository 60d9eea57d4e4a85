"""Everything that can be set about a server, from options or one TOML file; every error names the setting."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from petal._options import option
from petal.engine import ENGINES
from petal.errors import ConfigError
from petal.methods.inputs import check_choice, check_number
from petal.recipes.names import unknown
from petal.source_folder import read_config

BYTES_A_VALUE = 24                          # of a float as JSON text, with its comma
MOST_BYTES = 256 * 2**20

_model, _adapt, _batch, _limit, _port, _state = (
    partial(option, panel=panel) for panel in ("Model", "Adaptation", "Batches", "Limits", "Ports", "State")
)


@dataclass(frozen=True)
class Settings:
    """How a server is set up. Names are those of the options and of the keys in the TOML file."""

    name: str = _model("petal", "Name of the model in the address.")
    source: Path | None = _model(None, "A source folder, from `petal fit`: network, posterior, statistics, input, labels.")
    recipe: str | None = _model(None, "Network and method settings of a benchmark: cifar10, ...")
    network: str | None = _model(None, "A network by name, for example wrn-40-2.")
    classes: int | None = _model(None, "How many classes it has.")
    input: tuple[int, ...] = _model((3, 32, 32), "Shape of a sample. Default: 3,32,32.", text=True)
    labels: tuple[str, ...] = _model((), "Names of the classes, with commas.", text=True)
    weights: Path | None = _model(None, "The source network.")
    posterior: Path | None = _model(None, "The source posterior, from `petal fit`; PETAL needs it.")
    statistics: Path | None = _model(None, "Source statistics, from `petal fit --collect`; some methods need them.")

    method: str = _adapt("petal", "petal, cotta, tent, ..., also with something around it: petal+small+guard.", "-m")
    fidelity: str = _adapt("official", "Of the recipe's settings.", choices=("official", "paper"))
    set: tuple[str, ...] = _adapt((), "METHOD.OPTION=VALUE; guard.OPTION and small.OPTION too; may be repeated.")
    plugin: Path | None = _adapt(None, "A Python file that adds methods or networks.")
    seed: int = _adapt(0, "Of the method's random numbers.")
    guard: str | None = _adapt(None, "A guard around the method with this policy, for example rollback.")
    guard_set: tuple[str, ...] = _adapt((), "OPTION=VALUE of the guard; may be repeated.")
    small_batch: bool = _adapt(False, "Mode for few samples at a time: as METHOD+small.")
    device: str = _adapt("auto", "auto, cpu or cuda.")
    engine: str = _adapt("auto", "How it is executed.", choices=("auto", "eager"))

    batch_size: int = _batch(50, "Samples per batch.")
    delay_ms: float = _batch(10.0, "Milliseconds that the first request of a batch waits for others.")
    answer_first: bool = _batch(True, "Answer a batch before learning from it, where the method can. Default: yes.")
    queue: int | None = _batch(None, "Samples that may wait, or one request if it has more. Default: one batch.")

    request_samples: int | None = _limit(None, "Samples per request. Default: a whole batch.")
    max_body: int | None = _limit(None, "Bytes per request. Default: as many as its samples may take.")
    max_pixels: int = _limit(2**24, "Pixels of all images of a request, before decoding. Default: 2^24.")
    resize: bool = _limit(True, "Scale and cut images of another size, or refuse them. Default: scale.")
    connections: int = _limit(256, "At once.")
    read_seconds: float = _limit(10.0, "For the head of a request, and for its body.")
    idle_seconds: float = _limit(65.0, "That a connection may stay open between requests.")
    answer_seconds: float = _limit(30.0, "From acceptance to answer.")
    drain_seconds: float = _limit(20.0, "After SIGTERM, for what was accepted.")

    host: str = _port("127.0.0.1", "Default: 127.0.0.1; 0.0.0.0 lets everybody in.")
    http_port: int = _port(8080, "REST and /metrics.")
    grpc: bool = _port(True, "Serve gRPC too. Default: yes.")
    grpc_port: int = _port(8081, "Of gRPC.")
    admin_host: str = _port("127.0.0.1", "Of the admin port.")
    admin_port: int = _port(8082, "The live page and the admin actions.")
    token_file: Path | None = _port(None, "File with the admin token. Default: made in the folder.")

    folder: Path = _state(Path("runs/serve"), "Checkpoints, versions, audit log, token.")
    checkpoint_seconds: float = _state(30.0, "Between checkpoints.")
    snapshot_every: int = _state(200, "Adapting batches between versions that are kept.")
    snapshots: int = _state(5, "Versions that are kept.")
    compare_seconds: float = _state(0.5, "Between comparisons with the source, for the numbers and the page.")
    meta: Mapping[str, str] = field(default_factory=dict)   # shown on the page; the command line sets it

    def __post_init__(self) -> None:
        for name, low, high in (
            ("batch_size", 1, None), ("queue", 1, None), ("request_samples", 1, None), ("max_body", 1024, None),
            ("max_pixels", 1, None), ("connections", 1, None), ("snapshots", 1, None), ("snapshot_every", 1, None),
            ("classes", 1, None), ("seed", 0, None), ("http_port", 0, 65535), ("grpc_port", 0, 65535),
            ("admin_port", 0, 65535),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, low=low, high=high or float("inf"), whole=True)
        for name in ("delay_ms", "compare_seconds"):
            check_number(name, getattr(self, name), low=0)
        for name in ("read_seconds", "idle_seconds", "answer_seconds", "drain_seconds", "checkpoint_seconds"):
            check_number(name, getattr(self, name), low=0.1)
        if self.drain_seconds > 25:
            raise ConfigError(f"drain_seconds is at most 25, to checkpoint and exit within 30; got {self.drain_seconds:g}")
        check_choice("engine", self.engine, ENGINES)
        if not self.input or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.input):
            raise ConfigError(f"input is the shape of one sample, such as 3,32,32; got {self.input!r}")
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name):
            raise ConfigError(f"name is part of the address: letters, digits, - _ . only; got {self.name!r}")
        if self.samples > self.batch_size:
            raise ConfigError(f"request_samples is at most batch_size ({self.batch_size}), got {self.samples}")

    @property
    def samples(self) -> int:
        """Most samples of one request: they are answered by one version of the weights, so in one batch."""
        return self.batch_size if self.request_samples is None else self.request_samples

    @property
    def waiting(self) -> int:
        """Samples that may wait."""
        return self.batch_size if self.queue is None else self.queue

    @property
    def values(self) -> int:
        """Numbers in one sample."""
        count = 1
        for n in self.input:
            count *= n
        return count

    @property
    def body(self) -> int:
        """Most bytes of one request."""
        if self.max_body is not None:
            return self.max_body
        return min(MOST_BYTES, 2**20 + self.samples * self.values * BYTES_A_VALUE)

    def updated(self, given: Mapping[str, Any]) -> "Settings":
        """These settings with others in their place; None means not given."""
        return replace(self, **{k: _typed(k, v) for k, v in given.items() if v is not None})


def of_source(folder: str | Path) -> dict[str, Any]:
    """The settings that follow from a source folder: the shape of a sample and the names of the classes."""
    config = read_config(folder)
    return {"source": Path(folder), "input": config.input, "labels": config.class_names}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a file: the names of the options, with underscores. Paths are relative to the file.

    An unknown name is an error that says which one was probably meant.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"no settings at {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = [f.name for f in fields(Settings) if f.name != "meta"]
    for key, value in content.items():
        if key not in known:
            raise unknown("setting", key, known)
        if key in _PATHS and isinstance(value, str):
            content[key] = str(path.parent / value)
    return {key: _typed(key, value) for key, value in content.items()}


_HINTS = get_type_hints(Settings)
_PATHS = frozenset(name for name, hint in _HINTS.items() if hint is Path or Path in get_args(hint))


def _typed(name: str, value: Any) -> Any:
    """The value in the type that the setting has; a ConfigError that names both otherwise."""
    hint = _HINTS[name]
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if name in _PATHS and isinstance(value, (str, Path)):
        return Path(value)
    if name in ("input", "labels", "set", "guard_set") and isinstance(value, (list, tuple)):
        kind: type = int if name == "input" else str
        if all(isinstance(v, kind) for v in value):
            return tuple(value)
    elif float in kinds and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, bool):
        if bool in kinds:
            return value
    elif name == "meta" or isinstance(value, tuple(k for k in kinds if isinstance(k, type))):
        return value
    raise ConfigError(f"{name} cannot be {value!r}")
