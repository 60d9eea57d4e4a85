"""What can be set about `petal apply`, and the network, the adapter and the images that follow from it."""

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from petal._options import option
from petal.apply.text import pixels, triple
from petal.data.pictures import Pictures, open_pictures
from petal.errors import ConfigError
from petal.methods import Adapter
from petal.models import LIBRARIES, checkpoint_classes, is_function
from petal.models.preprocessing import INTERPOLATIONS, Preprocessing, normalising, preprocessing_of
from petal.recipes import Row
from petal.recipes.provenance import described
from petal.recommended import adapt
from petal.runs import Experiment, OpenExperiment
from petal.source_folder import read_config, read_names

_network, _picture, _adapt = (partial(option, panel=panel) for panel in ("Network", "Images", "Adaptation"))
OURS = "petal.adapt"            # what is used unless a method is named


@dataclass(frozen=True)
class Application:
    """A network, how images become its input, and how it adapts. Names are those of the options."""

    network: str | None = None
    source: str | None = _network(None, "A source folder, from `petal fit`, instead of NETWORK.", metavar="<path>")
    weights: str | None = _network(None, "Weights of the network.", metavar="<path>")
    pretrained: bool = _network(False, "The weights that timm, torchvision or transformers have for it; may download.")
    classes: int | None = _network(None, "How many classes it has. Default: as many as names, or as its card says.", low=1)
    class_names: Path | None = _network(None, "Names of the classes: a file with one a line, or JSON. Default: the card's.")
    posterior: str | None = _network(None, "The source posterior, if there is one.", metavar="<path>")
    statistics: str | None = _network(None, "Source statistics, for methods that need them.", metavar="<path>")

    resize: str | None = _picture(None, "Shorter side in pixels, or HEIGHTxWIDTH, or none. Default: the card's.", text=True)
    crop: str | None = _picture(None, "The centre cut out, like --resize. Default: card's.", text=True)
    interpolation: str | None = _picture(None, "Of resizing. Default: the card's.", choices=INTERPOLATIONS)
    mean: str | None = _picture(None, "Normalisation that the network expects but does not do: 0.5,0.4,0.4.", text=True)
    std: str | None = _picture(None, "The standard deviation that belongs to --mean: 0.2,0.2,0.2.", text=True)
    batch_size: int = _picture(64, "Images per batch.", low=1)
    every: int = _picture(1, "Of a video, take every N-th frame.", low=1)

    method: str | None = _adapt(None, "A row as in `petal run`: tent, eata, rotta+guard, ... Default: petal.adapt.", "-m")
    set: tuple[str, ...] = _adapt((), "METHOD.OPTION=VALUE; may be repeated.")
    flip: bool = _adapt(True, "A mirror image means the same (petal.adapt).")
    colour: bool = _adapt(True, "Colour and brightness carry no meaning (petal.adapt).")
    shuffled: bool = _adapt(False, "The order of the images means nothing (petal.adapt).")
    engine: str = _adapt("auto", "How it is executed; eager is plain torch.", choices=("auto", "eager"))
    plugin: str | None = _adapt(None, "A Python file that adds methods or networks.", metavar="<path>")
    seed: int = _adapt(0, "Of the method's random numbers.", low=0)

    def __post_init__(self) -> None:
        if (self.network is None) == (self.source is None) and not (self.network and is_function(self.network)):
            raise ConfigError("say which network: a name, or a source folder (--source), one of them")
        if self.method is None and self.set:
            raise ConfigError(f"settings are of a method: give --method too, or leave out {', '.join(self.set)}")
        if self.method is not None and not (self.flip and self.colour and not self.shuffled):
            raise ConfigError(
                "--no-flip, --no-colour and --shuffled are for petal.adapt; settings of a method are given by --set"
            )

    def open(self, path: str | Path, device: torch.device) -> "Opened":
        """Read network and images; nothing is written."""
        names, count = self._named(), self.classes
        if self.source is None and count is None:
            count = len(names) if names is not None else self._card()[0]
            if count is None and is_function(str(self.network)):
                raise ConfigError(f"say how many classes {self.network} has: --classes, or --class-names with a file")
        keep = ("network", "source", "weights", "pretrained", "posterior", "statistics", "engine", "plugin", "batch_size")
        experiment = Experiment(None, classes=count, **{name: getattr(self, name) for name in keep})
        experiment.load_plugin()
        rows = [] if self.method is None else experiment.rows([self.method], self.set)
        model = experiment.source_network()
        known = self.preprocessing(preprocessing_of(model))
        model = normalising(model, known)
        if names is None:
            names = self._card()[1] if self.source is None else read_config(self.source).class_names
        if names is not None and len(names) != experiment.classes:
            raise ConfigError(f"there are {len(names)} class names for {experiment.classes} classes")
        pictures = open_pictures(path, known, self.every)
        experiment = replace(experiment, input=(3, *pictures.shape))
        return Opened(self, experiment.open(device, model=model), pictures, known, names, rows[0] if rows else None)

    def preprocessing(self, card: Preprocessing | None) -> Preprocessing:
        """The card's, with what was given in its place. Its normalisation counts where the network does none itself."""
        found = card or Preprocessing()
        if self.resize is not None:
            found = replace(found, resize=pixels("--resize", self.resize))
        if self.crop is not None:
            side = pixels("--crop", self.crop)
            found = replace(found, crop=(side, side) if isinstance(side, int) else side)
        if self.interpolation is not None:
            found = replace(found, interpolation=self.interpolation)
        if self.mean is not None or self.std is not None:
            if self.mean is None or self.std is None:
                raise ConfigError("--mean and --std belong together: give both")
            found = replace(found, mean=triple("--mean", self.mean), std=triple("--std", self.std))
        return found

    def _named(self) -> tuple[str, ...] | None:
        return None if self.class_names is None else read_names(self.class_names)

    def _card(self) -> tuple[int | None, tuple[str, ...] | None]:
        """Classes and names of a library's own checkpoint."""
        name = str(self.network)
        own = self.pretrained or (name.startswith("transformers:") and self.weights is None)
        return checkpoint_classes(name) if own and name.partition(":")[0] in LIBRARIES else (None, None)


@dataclass
class Opened:
    """An application with everything read."""

    settings: Application
    opened: OpenExperiment
    pictures: Pictures
    preprocessing: Preprocessing
    names: tuple[str, ...] | None
    row: Row | None

    @property
    def method(self) -> str:
        """What adapts, for people."""
        return OURS if self.row is None else self.row.name

    def adapter(self) -> Adapter:
        """A new adapter."""
        s = self.settings
        if self.row is not None:
            return self.opened.adapter(self.row, s.seed)
        plain = adapt(
            self.opened.model, self.opened.posterior, flip=s.flip, colour=s.colour, shuffled=s.shuffled, seed=s.seed,
            engine="eager",
        )
        return self.opened.executed(plain)

    def about(self) -> dict[str, Any]:
        """What must be the same for work to be continued, as plain data: no path of this machine."""
        e, s = self.opened.experiment, self.settings
        kept = ("batch_size", "flip", "colour", "shuffled", "engine", "seed", "set", "pretrained")
        given = {f.name: getattr(s, f.name) for f in fields(s) if f.name in kept}
        plugin = e.load_plugin()
        return {
            "network": e.network, "classes": e.classes, "class_names": None if self.names is None else list(self.names),
            "weights": described(e.weights).get("sha256"), "posterior": described(e.posterior).get("sha256"),
            "statistics": described(e.statistics).get("sha256"), "plugin": plugin.get("sha256"), "method": self.method,
            "device": self.opened.device.type, "input": self.pictures.fingerprint(),
            "preprocessing": self.preprocessing.to_json(), **given | {"set": list(s.set)},
        }  # fmt: skip
