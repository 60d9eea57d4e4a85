"""A source as a folder: network, posterior and statistics, with all that is needed to build and feed the network.

    FOLDER/config.json              format "petal-source-1": the network by name with its options, classes and their names,
                                    the shape of an input, preprocessing, and the SHA-256 of the files
    FOLDER/network.safetensors      its state_dict
    FOLDER/posterior.safetensors    `petal.Posterior`, if there is one
    FOLDER/statistics.safetensors   `petal.SourceStatistics`, if there are some
    FOLDER/README.md                a card for people

`petal fit` and `save_source` write it; `load_source` and the option `--source` of the commands read it. It has no pickles
and no path of the machine that wrote it: it can be copied, and put on a model hub, as it is. Nothing in it is run. A network
that is a function of one's own is code, so whoever loads the folder names the function again.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from petal import models
from petal._files import make_folder, replacing, write_json, write_tensors, writing
from petal._version import __version__
from petal.errors import ConfigError, ModelError
from petal.models.preprocessing import Preprocessing, normalising, preprocessing_of, with_normalisation
from petal.norm import unwrapped
from petal.posterior import DiagonalGaussian, LowRankGaussian, load_posterior
from petal.statistics import SourceStatistics

FORMAT = "petal-source-1"
CONFIG, CARD = "config.json", "README.md"
NETWORK, POSTERIOR, STATISTICS = FILES = tuple(f"{part}.safetensors" for part in ("network", "posterior", "statistics"))
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class SourceConfig:
    """What the config.json of a source folder says."""

    folder: Path
    network: str
    classes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    input: tuple[int, ...] | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    class_names: tuple[str, ...] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path | None:
        """One of the `FILES`, or None if the source has none such."""
        return self.folder / name if name in self.files else None

    def check_files(self) -> None:
        """Raise a ModelError unless every file is there as it was written."""
        for name, known in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ModelError(f"{path} is missing, and {CONFIG} lists it: the folder was copied in part")
            if _hash(path) != known:
                raise ModelError(f"{path} is not the file that {CONFIG} lists: it is damaged, or was changed afterwards")

    def model(self, network: str | nn.Module | None = None) -> nn.Module:
        """The network, which takes images in [0, 1], with the source weights.

        One that is a function of one's own (`package.module:function`) is run only if `network` names the same; or `network`
        is the module itself.
        """
        if isinstance(network, nn.Module):
            built = models.load_weights(deepcopy(network), self.folder / NETWORK).eval()
        else:
            self.check_name(network)
            options = dict(self.options) | ({"pretrained": False} if self.network.startswith("transformers:") else {})
            built = models.build(self.network, self.classes, self.folder / NETWORK, **options)
        built.preprocessing = self.preprocessing  # type: ignore[assignment]
        return normalising(built, self.preprocessing)

    def check_name(self, network: str | None) -> None:
        """Raise a ModelError if the network is code that nobody asked for, or another one than was asked for."""
        if network is None and models.is_function(self.network):
            raise ModelError(
                f"{self.folder} is of a network made by {self.network}: that is code of this machine, and is run only if "
                f"you name it too, network={self.network!r} or --network {self.network}"
            )
        if network is not None and network != self.network:
            raise ModelError(f"{self.folder} is of the network {self.network}, not of {network}: leave the network out")


@dataclass(frozen=True, eq=False)
class LoadedSource:
    """A source folder, read: the network takes images in [0, 1], and what else there is fits it."""

    config: SourceConfig
    model: nn.Module
    posterior: DiagonalGaussian | LowRankGaussian | None = None
    statistics: SourceStatistics | None = None


def save_source(
    folder: PathLike,
    model: nn.Module,
    network: str,
    *,
    classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    posterior: DiagonalGaussian | LowRankGaussian | None = None,
    statistics: SourceStatistics | None = None,
    input: Sequence[int] | None = None,
    preprocessing: Preprocessing | None = None,
    class_names: Sequence[str] | None = None,
) -> SourceConfig:
    """Write a network, with what is known of its source, as a folder that `load_source` and `--source` read.

    `network`, `classes` and `options` are what `petal.models.build` makes it of; `class_names` say `classes` too.
    `preprocessing` is by default what the network says of itself (`petal.models.preprocessing_of`); with a `mean` and `std`
    there, a network that takes normalised images takes pixels in [0, 1] when it is loaded. `input` is the shape of a sample.
    Before anything is written the network is built and compared. A README.md that was edited stays.

    >>> import tempfile, petal
    >>> model = petal.models.build("small", 10, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = petal.save_source(folder, model, "small", classes=10, posterior=petal.DiagonalGaussian.isotropic(model, 0.1))
    ...     source = petal.load_source(folder)
    >>> source.config.input, source.posterior is not None, source.statistics is None
    ((3, 32, 32), True, True)
    """
    model, folder = unwrapped(model), Path(folder)
    if classes is None:
        if class_names is None:
            raise ModelError("say how many classes the network has: classes, or class_names")
        classes = len(class_names)
    for part in (posterior, statistics):
        if part is not None:
            part.check(model)
    known = preprocessing or preprocessing_of(model) or Preprocessing()
    shape = tuple(input) if input is not None else None if known.size is None else (3, *known.size)
    config = SourceConfig(folder, network, classes, dict(options or {}), shape, with_normalisation(model, known),
                          None if class_names is None else tuple(map(str, class_names)))  # fmt: skip
    check_config(config)
    _check_same(model, config)
    make_folder(folder)
    with writing(folder / CONFIG):
        (folder / CONFIG).unlink(missing_ok=True)           # what is half written is no source
    save_network(model, folder / NETWORK)
    for name, part in ((POSTERIOR, posterior), (STATISTICS, statistics)):
        if part is not None:
            part.save(folder / name)
        else:
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
    return write_config(config)


def load_source(folder: PathLike, network: str | nn.Module | None = None) -> LoadedSource:
    """Read a source folder; a ModelError says what is missing, damaged, or of another version.

    `network` is needed only where the network is made by a function of one's own: its name again, or the module.
    """
    config = read_config(folder)
    config.check_files()
    model = config.model(network)
    posterior, statistics = config.path(POSTERIOR), config.path(STATISTICS)
    q = None if posterior is None else load_posterior(posterior)
    known = None if statistics is None else SourceStatistics.load(statistics)
    for part in (q, known):
        if part is not None:
            part.check(model)
    return LoadedSource(config, model, q, known)


def read_config(folder: PathLike) -> SourceConfig:
    """What the config.json in a source folder says, checked."""
    folder = Path(folder)
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(f"no source at {folder}: give a folder that `petal fit` or petal.save_source wrote")
    if not path.is_file():
        inside = "; its files can be given one by one, as --weights, --posterior" if (folder / NETWORK).is_file() else ""
        raise ModelError(f"{folder} is no source, it has no {CONFIG}: give a folder that `petal fit` wrote{inside}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or not str(content.get("format", "")).startswith("petal-source-"):
        raise ModelError(f"{path} does not describe a source of petal: it has no format {FORMAT!r}")
    if content["format"] != FORMAT:
        wrote = content.get("petal", "another")
        raise ModelError(f"{path} has format {content['format']!r}, of petal {wrote}; petal {__version__} reads {FORMAT!r}")
    try:
        names, shape = content.get("class_names"), content.get("input")
        config = SourceConfig(
            folder, str(content["network"]), content["classes"], dict(content.get("options") or {}),
            None if shape is None else tuple(shape), Preprocessing.from_json(content.get("preprocessing") or {}),
            None if names is None else tuple(names), dict(content["files"]),
        )  # fmt: skip
        check_config(config)
        unknown = config.files.keys() - set(FILES)
        if unknown or NETWORK not in config.files:
            raise ModelError(f"files are {NETWORK} and perhaps {POSTERIOR}, {STATISTICS}; got {', '.join(config.files)}")
    except (KeyError, TypeError, ValueError) as error:      # a ModelError is a ValueError
        what = str(error) if isinstance(error, ModelError) else f"{type(error).__name__} {error}"
        raise ModelError(f"{path} cannot be used: {what}") from error
    return config


def write_config(config: SourceConfig, about: str = "") -> SourceConfig:
    """Write config.json and the card for the files that lie in the folder."""
    files = {name: _hash(config.folder / name) for name in FILES if (config.folder / name).is_file()}
    path = config.folder / CARD
    if not path.is_file() or _unedited(path.read_text(encoding="utf-8")):
        with writing(path), replacing(path) as temporary:
            temporary.write_text(_signed(_card(config, files, about)), encoding="utf-8")
    write_json(config.folder / CONFIG, {
        "format": FORMAT, "petal": __version__, "network": config.network, "options": dict(config.options),
        "classes": config.classes, "input": None if config.input is None else list(config.input),
        "preprocessing": config.preprocessing.to_json(),
        "class_names": None if config.class_names is None else list(config.class_names), "files": files,
    })  # fmt: skip
    return replace(config, files=files)


def read_names(path: PathLike) -> tuple[str, ...]:
    """Names of classes from a file, one a line, or JSON, a list or an object from numbers to names; or a source folder's."""
    path = Path(path)
    if path.is_dir():
        names = read_config(path).class_names
        if names is None:
            raise ConfigError(f"{path} has no names of classes: give a file with one a line")
        return names
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines() if line.strip()]
        if isinstance(found, Mapping):
            found = [found[str(number)] for number in range(len(found))]
        names = tuple(str(name[-1] if isinstance(name, list) else name) for name in found)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as names of classes, one a line or as JSON: {error}") from error
    if not names:
        raise ConfigError(f"{path} names no class")
    return names


def save_network(model: nn.Module, path: Path) -> None:
    """A network's state_dict as safetensors; weights that are shared are written under each of their names."""
    state, seen = {}, set[int]()
    for name, value in model.state_dict().items():
        place = value.untyped_storage().data_ptr()
        state[name] = value.clone() if place in seen else value
        seen.add(place)
    try:
        write_tensors(path, state, {})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the network to {path}: {error}") from error


def check_config(config: SourceConfig) -> None:
    """Raise a ModelError for what cannot be a source, or would make loading it unsafe or depend on this machine."""
    if isinstance(config.classes, bool) or not isinstance(config.classes, int) or config.classes < 1:
        raise ModelError(f"classes is a whole number from 1; got {config.classes!r}")
    names = config.class_names
    if names is not None and (len(names) != config.classes or not all(isinstance(name, str) for name in names)):
        raise ModelError(f"there are {len(names)} class names for {config.classes} classes")
    if config.input is not None and not all(isinstance(n, int) and n > 0 for n in config.input):
        raise ModelError(f"input is the shape of a sample, such as [3, 32, 32]; got {config.input!r}")
    library, colon, inner = config.network.partition(":")
    if Path(inner or library).is_absolute() or (colon and library == "transformers" and Path(inner).exists()):
        raise ModelError(f"{config.network} names a folder of this machine: give the name that others know it by")
    for name, value in config.options.items():
        flat = value if isinstance(value, (list, tuple)) else [value]
        plain = (int, float, bool, type(None), *(() if colon else (str,)))
        if name in ("trust_remote_code", "pretrained") or not all(isinstance(v, plain) for v in flat):
            kinds = "numbers, true and false" + ("" if colon else ", texts")
            option = f"{name}={value!r} of {config.network}"
            raise ModelError(f"the option {option} cannot be part of a source: options are {kinds}")


def _check_same(model: nn.Module, config: SourceConfig) -> None:
    """Raise a ModelError unless the network by this name has the same weights by name and shape."""
    options = dict(config.options) | ({"pretrained": False} if config.network.startswith("transformers:") else {})
    built = models.build(config.network, config.classes, **options).state_dict()
    mine = model.state_dict()
    wrong = sorted(built.keys() ^ mine.keys()) or [name for name, v in built.items() if v.shape != mine[name].shape]
    if wrong:
        made = f"{config.network} with {config.classes} classes and options {dict(config.options)}"
        raise ModelError(f"this network is not {made}: they differ in {', '.join(wrong[:5])}")


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _signed(card: str) -> str:
    """A card that says by its last line whether somebody has edited it."""
    return f"{card}\n<!-- petal {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def _unedited(card: str) -> bool:
    found = re.fullmatch(r"(.*)\n<!-- petal \w+ -->\n", card, re.DOTALL)
    return found is not None and _signed(found[1]) == card


def _card(config: SourceConfig, files: Mapping[str, str], about: str) -> str:
    """The README.md: what the folder is, and how it is used."""
    p = config.preprocessing
    takes = [] if config.input is None else [f"Input: {' x '.join(map(str, config.input))}, pixels in [0, 1]."]
    if p.resize or p.crop:
        sides = " x ".join(map(str, p.resize)) if isinstance(p.resize, tuple) else f"shorter side to {p.resize}"
        steps = ([f"resize ({sides}, {p.interpolation})"] if p.resize else []) + (
            [f"centre crop {p.crop[0]} x {p.crop[1]}"] if p.crop else [])  # fmt: skip
        takes.append(f"Preprocessing: {', '.join(steps)}.")
    if p.mean and p.std:
        takes.append(f"Normalisation by mean {list(p.mean)} and standard deviation {list(p.std)} is a part of the network.")
    names = [] if config.class_names is None else ["", f"Classes: {', '.join(config.class_names)}."]
    confirm = f", network={config.network!r}" if models.is_function(config.network) else ""
    return "\n".join([
        "---", "library_name: petal-tta", "pipeline_tag: image-classification",
        "tags: [petal, test-time-adaptation]", "---", "",
        f"# {config.network}, {config.classes} classes", "",
        "A source network for lifelong test-time adaptation, with what is known of the data it was trained on.", "",
        *takes, *names, *(["", about] if about else []), "",
        "| file | contents |", "| --- | --- |", f"| {CONFIG} | network, classes, preprocessing, SHA-256 of the files |",
        *(f"| {name} | {WHAT[name]} |" for name in files), "",
        "```python", "import petal", "",
        f'source = petal.load_source("FOLDER"{confirm})', "adapter = petal.adapt(source.model)", "```", "",
        "On a folder of images: `petal apply --source FOLDER images --out predictions.csv`", "",
    ])  # fmt: skip


WHAT = {NETWORK: "the weights", POSTERIOR: "the source posterior", STATISTICS: "source statistics"}
