"""From names and paths to a stream and an adapter: the one place where runs, sweeps, tuning and the server get theirs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from petal import models
from petal._options import option
from petal.data import STREAMS, CorruptedDataset, Dataset, Frames, Stream
from petal.engine import accelerate, policy_for
from petal.errors import ConfigError
from petal.methods import METHODS, Adapter
from petal.methods.mean_teacher import MeanTeacher
from petal.models import check_input
from petal.parallel import Ranks, parallelize
from petal.posterior import Posterior
from petal.recipes.fit import TrainProgress
from petal.recipes.published import Recipe, recipe
from petal.recipes.rows import (
    WRAPPERS,
    Row,
    load_plugin,
    needs_posterior,
    needs_statistics,
    own_defaults,
    pick_rows,
    rows,
    takes_posterior,
)
from petal.recipes.settings import apply_settings
from petal.runs.protocols import Protocol, protocol
from petal.runs.sources import load_posterior, load_statistics, make_source, open_test
from petal.source_folder import NETWORK, POSTERIOR, STATISTICS, SourceConfig, read_config
from petal.statistics import SourceStatistics
from petal.swag import FitProgress

WAYS = ("protocol", "reset_per_domain", "after", "rate", "rate_ms")      # how one evaluates: nothing for tuning
ORDER = ("stretch", "alternate", "sources", "mean_run", "frames")       # further settings of it, in manifests where given


@dataclass(frozen=True)
class Experiment:
    """Names, paths and settings from which any process makes the same streams and adapters.

    Without a recipe it has no stream: a network of one's own is served, and methods have their own defaults.
    """

    recipe: str | None = None
    protocol: str | None = option(
        None, "How the evaluation is done, by a name that fixes everything about the stream, such as table1-2000: "
        "`petal protocols` lists them. Options that contradict it are refused.",
    )  # fmt: skip
    severity: int | None = option(None, "Severity. Default: 5.", low=1, high=5)
    batch_size: int | None = option(None, "Images per batch. Default: the recipe's.", low=1)
    images: int | None = option(None, "Take only the first N images of each domain.", low=1)
    visits: int | None = option(None, "Let the domains recur, so many times in all.", low=1)
    label_correlation: float | None = option(
        None, "Let labels come in runs: a Dirichlet concentration, such as 0.1; the smaller, the longer the runs."
    )
    stretch: int | None = option(None, "With --label-correlation: no runs, but the same classes for N images.", low=1)
    alternate: int | None = option(None, "With --label-correlation: N domains with runs, N without, and so on.", low=1)
    sources: int | None = option(None, "With --label-correlation: N sources of images, interleaved at random.", low=1)
    mean_run: float | None = option(None, "Let labels be a Markov chain with runs of so many images on average.", low=1)
    frames: int | None = option(None, "Take N frames of every image, as a camera that moves over it sees them.", low=1)
    reset_per_domain: bool | None = option(None, "Every method starts anew when the domain changes; no lifelong adaptation.")
    after: bool | None = option(None, "Score the answers of after the update from a batch, not of before.")
    rate: float | None = option(
        None, "Equal time: the stream comes at so many times the source network's speed (at most 1), and a method that is "
        "slower misses batches: it answers them with the weights it has.", low=0,
    )  # fmt: skip
    rate_ms: str | None = option(
        None, "With --rate: ms per batch, as source=10,tent=26; what is not given is measured.", metavar="ROW=MS,..."
    )
    data: str | None = option(None, "Clean images, corrupted on the fly, or a folder of published -C files.")
    corrupted: str | None = option(None, "A folder of published -C files.", metavar="<path>")
    ids: str | None = option(None, "List of the images of ImageNet-C to use (RobustBench's 5,000).", metavar="<path>")
    source: str | None = option(
        None, "A source folder, from `petal fit`: network, posterior and statistics in one.", metavar="<path>"
    )
    weights: str | None = option(None, "The source network.", metavar="<path>")
    pretrained: bool = option(
        False, "Instead of --weights: the weights that timm, torchvision or transformers have for the network; may download."
    )
    posterior: str | None = option(None, "The source posterior, from `petal fit`; PETAL needs it.", metavar="<path>")
    statistics: str | None = option(
        None, "Source statistics, from `petal fit --collect`; some methods need them.", metavar="<path>"
    )
    network: str | None = option(None, "Another network than the recipe's, for example wrn-40-2.")
    engine: str = option("auto", "How it is executed; eager is plain torch.", choices=("auto", "eager"))
    fidelity: str = option(
        "official", "Settings of the released code, or of the paper's text.", choices=("official", "paper")
    )
    plugin: str | None = option(None, "A Python file that adds methods or networks.", metavar="<path>")
    stream: str | None = None               # one of the `STREAMS` instead of the recipe's
    stream_seed: int = option(
        0, "Seed of the stream: of the corruptions' noise, and of the order with --shuffle. --seed is the method's.", low=0
    )
    shuffle: bool = option(False, "Shuffle the images of every domain; otherwise they come in the order of the data.")
    classes: int | None = None              # of the network; None: the recipe's
    input: tuple[int, ...] | None = None    # shape of a sample where there is no stream, as in a server

    def __post_init__(self) -> None:
        if self.source is not None:
            self._take_source(read_config(self.source))
        if self.recipe is None:
            return
        own = self.chosen
        if self.protocol is not None:
            unset = {f.name: f.default for f in fields(self)}
            given = {name: getattr(self, name) for name in unset}
            for name, value in protocol(self.protocol).settle(own, given, unset).items():
                object.__setattr__(self, name, value)
        if self.severity is not None and own.severity is None:
            raise ConfigError(f"{own.name} goes through all severities: leave the severity out")
        ways = [name for name in ("visits", "label_correlation", "mean_run") if getattr(self, name) is not None]
        if ways and own.stream != "continual":
            raise ConfigError(f"{ways[0]} changes a continual stream; that of {own.name} is {own.stream}")
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} make different streams: leave one of them out")
        for name in ("stretch", "alternate", "sources"):
            if getattr(self, name) is not None and self.label_correlation is None:
                raise ConfigError(f"{name} changes a stream whose labels come in runs: give label_correlation too")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ConfigError(f"rate={self.rate:g}: a stream comes at more than 0 and at most 1 times the source network's "
                              "speed, or nobody keeps up with it")  # fmt: skip
        if self.rate_ms is not None and self.rate is None:
            raise ConfigError("rate_ms are the times that a rate goes by: give rate too")
        if self.rate is not None and self.after:
            raise ConfigError("at a rate, what is answered is what a method says when a batch comes: leave after out")

    def _take_source(self, config: SourceConfig) -> None:
        """Fill in what the source folder says; what contradicts it is refused."""
        own = config.path(NETWORK)
        if self.pretrained or (self.weights is not None and Path(self.weights) != own):
            weights = self.weights or "pretrained"
            raise ConfigError(f"source and weights both name a network ({self.source}, {weights}): leave one of them out")
        if self.network is not None and self.network != config.network:
            both = f"{config.network}, {self.network}"
            raise ConfigError(f"source and network name two networks ({both}): leave one of them out")
        config.check_name(self.network)
        wanted = self.classes if self.recipe is None or self.classes is not None else recipe(self.recipe).classes
        if wanted is not None and wanted != config.classes:
            raise ConfigError(f"the network in {self.source} has {config.classes} classes, and {wanted} are asked for")
        found: dict[str, Any] = {"network": config.network, "classes": config.classes, "weights": own}
        found["posterior"] = self.posterior or config.path(POSTERIOR)
        found["statistics"] = self.statistics or config.path(STATISTICS)
        if self.recipe is None and self.input is None:
            found["input"] = config.input
        for name, value in found.items():
            object.__setattr__(self, name, str(value) if isinstance(value, Path) else value)

    @property
    def chosen(self) -> Recipe:
        """The recipe, with the network, number of classes and stream that were asked for."""
        if self.recipe is None:
            raise ConfigError("there is no stream without a recipe: name one, such as cifar10")
        found = recipe(self.recipe)
        if self.network is not None:
            found = replace(found, network=self.network, network_options={})
        if self.stream is not None:         # a gradual one has all severities; any other has the highest
            found = replace(found, stream=self.stream, severity=found.severity or 5)
        return found if self.classes is None else replace(found, classes=self.classes)

    def orders(self, asked: Sequence[int] = ()) -> list[int]:
        """The orders to run: those asked for, else those of the protocol or the recipe."""
        named: Protocol | None = None if self.protocol is None else protocol(self.protocol)
        return list(asked or self.chosen.numbers) if named is None else named.orders_of(self.chosen, asked)

    def known_rows(self) -> dict[str, Row]:
        """Every row by its name, those of a plugin's methods among them."""
        self.load_plugin()
        return own_defaults() if self.recipe is None else rows(self.chosen, self.fidelity)

    def rows(self, wanted: Sequence[str], settings: Sequence[str] = ()) -> list[Row]:
        """The rows called `wanted`, such as `petal+small+guard`, with `METHOD.OPTION=VALUE` settings applied."""
        return pick_rows(apply_settings(self.known_rows(), settings, WRAPPERS), wanted)

    def load_plugin(self) -> dict[str, str]:
        """Run the plugin, if there is one and unless that is done. Returns its path and hash."""
        return {} if self.plugin is None else load_plugin(self.plugin)

    def open_data(self) -> Dataset:
        """The images of the stream."""
        data = open_test(self.chosen, self.data, self.corrupted, self.ids)
        return data if self.frames is None else Frames(data, self.frames)

    def with_source(
        self, folder: Path, device: torch.device, on_train: Callable[[TrainProgress], None] | None = None,
        on_swag: Callable[[FitProgress], None] | None = None,
    ) -> "Experiment":  # fmt: skip
        """The same with a source network: that of a built-in recipe is made in `folder` unless it is there."""
        chosen = self.chosen
        if not chosen.builtin or self.weights is not None or self.network is not None:
            return self
        self.open_data()                    # a mistake there is found before the training
        weights, posterior, statistics = map(str, make_source(chosen, folder, device, on_train, on_swag))
        posterior, statistics = self.posterior or posterior, self.statistics or statistics
        return replace(self, weights=weights, posterior=posterior, statistics=statistics)

    def open(
        self, device: torch.device, ranks: Ranks | None = None, model: nn.Module | None = None
    ) -> "OpenExperiment":  # fmt: skip
        """Read everything: images, source network (unless it is given), posterior. A plugin is run."""
        self.load_plugin()
        data = None if self.input is not None else self.open_data()
        model = (self.source_network() if model is None else model).to(device)
        posterior, statistics = load_posterior(self.posterior, model), load_statistics(self.statistics, model)
        return OpenExperiment(self, model, posterior, data, ranks, statistics)

    def source_network(self) -> nn.Module:
        """The network with the source weights."""
        if self.source is not None:
            config = read_config(self.source)
            config.check_files()
            return config.model(self.network)
        name, classes, options = self.network, self.classes, dict[str, Any]()
        if self.recipe is not None:
            name, classes, options = self.chosen.network, self.chosen.classes, dict(self.chosen.network_options)
        if name is None or classes is None:
            raise ConfigError("say which network it is: name a recipe, or a network and its number of classes")
        if self.pretrained:
            if self.weights is not None or name.partition(":")[0] not in models.LIBRARIES:
                libraries = ", ".join(models.LIBRARIES)
                raise ConfigError(f"pretrained is for networks of {libraries}, without weights; this is {name}")
            options["pretrained"] = True
        elif self.weights is None and not models.is_function(name):
            raise ConfigError(
                f"{self.recipe or 'an experiment'} needs the source network ({name}): give --source or --weights, or make "
                f"it with `petal fit --recipe {self.recipe or 'RECIPE'}`"
            )
        return models.build(name, classes, None if self.weights is None else Path(self.weights), **options).eval()


@dataclass
class OpenExperiment:
    """An experiment with everything read: it gives streams, and adapters around one source network.

    Several processes that share out the views of a batch are `ranks`.
    """

    experiment: Experiment
    model: nn.Module
    posterior: Posterior | None = None
    data: Dataset | None = None
    ranks: Ranks | None = None
    statistics: SourceStatistics | None = None
    compiled_for: str = field(default="", repr=False)       # the method whose programs torch holds
    _checked: bool = field(default=False, repr=False)

    @property
    def recipe(self) -> Recipe:
        """The benchmark."""
        return self.experiment.chosen

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @property
    def severity(self) -> int | None:
        """Severity of the stream; None if it has its own."""
        return self.recipe.severity if self.experiment.severity is None else self.experiment.severity

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.experiment.batch_size or self.recipe.batch_size

    @property
    def stream_name(self) -> str:
        """Which of the `STREAMS`."""
        if self.experiment.visits is not None:
            return "recurring"
        if self.experiment.mean_run is not None:
            return "markov"
        return self.recipe.stream if self.experiment.label_correlation is None else "correlated"

    @property
    def images(self) -> Dataset:
        """The images of the stream."""
        if self.data is None:
            raise ConfigError("this experiment has a network and no images: it has no stream")
        return self.data

    def stream(self, order: int | Sequence[str]) -> Stream:
        """The stream of a published order, or of corruptions by name.

        Clean images are corrupted on the network's device; corrupted ones are read ahead.
        """
        e, ready = self.experiment, isinstance(self.images, CorruptedDataset)
        options: dict[str, Any] = {} if self.severity is None else {"severity": self.severity}
        given = {"visits": e.visits, "concentration": e.label_correlation, "stretch": e.stretch, "alternate": e.alternate,
                 "sources": e.sources, "run": e.mean_run}  # fmt: skip
        options |= {name: value for name, value in given.items() if value is not None}
        if e.shuffle:
            options["shuffle"] = True
        return STREAMS[self.stream_name](
            self.images, self.recipe.order(order) if isinstance(order, int) else list(order),
            batch_size=self.batch_size, images=e.images, seed=e.stream_seed, profile=self.recipe.profile,
            device=None if ready else self.device, prefetch=2 if ready else 0, **options,
        )  # fmt: skip

    def adapter(self, row: Row, seed: int = 0) -> Adapter:
        """The row's method around the source network with all that goes around it, executed as the engine says."""
        return self.executed(self.plain_adapter(row, seed))

    def executed(self, adapter: Adapter) -> Adapter:
        """An adapter of the source network, executed as the engine says."""
        # Which program runs a batch must not depend on how many came before it: a resumed run gives the same numbers. So
        # the shape of a whole batch is compiled from the first one on, and on a CPU, where that takes long, nothing is.
        if adapter.device.type == "cuda":
            return accelerate(adapter, self.experiment.engine, batch_shape=self.batch_shape())
        policy = replace(policy_for(adapter.device), compile=False)
        return accelerate(adapter, self.experiment.engine, policy=policy)

    def plain_adapter(self, row: Row, seed: int = 0) -> Adapter:
        """The same, executed by plain torch. PETAL starts at the mean of its posterior."""
        method = METHODS[row.method]
        arguments: list[Any] = [self.model]
        if takes_posterior(method):
            if self.posterior is None and needs_posterior(row):
                fit = "petal fit" + (f" --recipe {self.experiment.recipe} --weights ..." if self.experiment.recipe else "")
                raise ConfigError(
                    f"{row.label} needs the source posterior: make one with `{fit}`, give it as --posterior, or choose "
                    f"other methods than {row.name} with --method"
                )
            arguments.append(self.posterior)
        options: Mapping[str, Any] = row.options
        if needs_statistics(method):
            options = {**options, "statistics": self._statistics_for(row)}
        if "seed" in signature(method.__init__).parameters:
            options = {**options, "seed": seed}
        adapter: Adapter = method(*arguments, **options)
        if self.ranks is not None and isinstance(adapter, MeanTeacher):
            parallelize(adapter, self.ranks)
        for name in row.wraps:
            known = {"statistics": self.statistics} if needs_statistics(WRAPPERS[name]) else {}
            adapter = WRAPPERS[name](adapter, **known, **row.wrapper_options.get(name, {}))
        return adapter

    def _statistics_for(self, row: Row) -> SourceStatistics | None:
        """What a method is given as `statistics`: None only where it can do without."""
        if self.statistics is None and signature(METHODS[row.method].__init__).parameters["statistics"].default is not None:
            raise ConfigError(
                f"{row.label} needs source statistics: make them with `petal fit --collect prototypes,fisher`, give them as "
                f"--statistics, or choose other methods than {row.name} with --method"
            )
        return self.statistics

    def check(self, rows: Sequence[Row]) -> None:
        """Make an adapter of each row: one that cannot be run is found before an hour has gone into the others."""
        for row in rows:
            self.adapter(row)

    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a whole batch."""
        if self.experiment.input is not None:
            return (self.batch_size, *self.experiment.input)
        data = self.images
        if isinstance(data, CorruptedDataset):
            data = data.corrupted(self.recipe.order(1)[0], self.severity or 5)
        return (min(self.batch_size, self.experiment.images or len(data)), *data.batch([0])[0].shape[1:])

    def check_pixels(self, x: Tensor) -> None:
        """Warn, once, if the images do not look like what the network was trained on."""
        if not self._checked:
            self._checked = True
            check_input(self.model, x)
