"""Everything that can be set about a server, from options or one TOML file; every error names the setting."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from petal.engine import ENGINES
from petal.errors import ConfigError
from petal.methods.inputs import check_choice, check_number
from petal.recipes.names import unknown

BYTES_A_VALUE = 24                          # of a float as JSON text, with its comma
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Settings:
    """How a server is set up. Names are those of the options and of the keys in the TOML file."""

    # the model
    name: str = "petal"
    recipe: str | None = None               # network, input and method settings of a benchmark
    network: str | None = None
    classes: int | None = None
    input: tuple[int, ...] = (3, 32, 32)    # shape of one sample
    labels: tuple[str, ...] = ()            # names of the classes
    weights: Path | None = None
    posterior: Path | None = None
    # how it adapts
    method: str = "petal"
    fidelity: str = "official"
    set: tuple[str, ...] = ()               # METHOD.OPTION=VALUE
    plugin: Path | None = None
    seed: int = 0
    guard: str | None = None                # policy of petal.Guard
    guard_set: tuple[str, ...] = ()         # OPTION=VALUE of petal.Guard
    small_batch: bool = False               # petal.SmallBatch around the method
    device: str = "auto"
    engine: str = "auto"
    # batches
    batch_size: int = 50                    # samples
    delay_ms: float = 10.0                  # how long the first request of a batch waits for others
    queue: int | None = None                # samples that may wait, or one request if it has more; None: one batch
    # limits
    request_samples: int | None = None      # None: a whole batch
    max_body: int | None = None             # bytes of a request; None: from the sizes above
    max_pixels: int = 2**24                 # of all images of a request, before decoding
    resize: bool = True                     # images of another size are scaled and cut; else refused
    connections: int = 256
    read_seconds: float = 10.0              # for the head of a request, and for its body
    idle_seconds: float = 65.0              # a connection may stay open between requests
    answer_seconds: float = 30.0            # from acceptance to answer
    drain_seconds: float = 20.0             # after SIGTERM, for what was accepted
    # ports
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc: bool = True
    grpc_port: int = 8081
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    token_file: Path | None = None          # None: one is made in the folder
    # state
    folder: Path = Path("runs/serve")
    checkpoint_seconds: float = 30.0
    snapshot_every: int = 200               # adapting batches between versions that are kept
    snapshots: int = 5                      # how many are kept
    compare_seconds: float = 0.5            # between comparisons with the source, for the numbers and the page
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
