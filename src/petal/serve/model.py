"""What is served: the adapter with its guard, and the frozen source beside it."""

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from petal.errors import ConfigError, InputError
from petal.methods import METHODS, Adapter, Source
from petal.models import is_function
from petal.models.pixels import UNIT_PIXELS, expected_input
from petal.recipes import WRAPPERS, Row, recipe
from petal.recipes.rows import needs_statistics, takes_posterior
from petal.runs import Experiment, OpenExperiment
from petal.runs.records import distance_from_start
from petal.serve.settings import Settings
from petal.source_folder import read_config

log = logging.getLogger(__name__)


@dataclass
class Served:
    """An adapter (possibly inside a guard), the frozen source, and how to make another adapter like it."""

    adapter: Adapter
    source: Adapter
    make: Callable[[], Adapter]             # the same, fresh and eager: serves kept versions
    row: str
    classes: int
    unit_pixels: bool                       # samples are images in [0, 1]
    distance: Callable[[], float] | None    # of the weights from where they started
    guard: str | None = None                # policy of the guard, if there is one

    @property
    def core(self) -> Adapter:
        """The method itself, without what is around it."""
        return inner(self.adapter)

    @property
    def learns(self) -> bool:
        """True if calls change anything: some parameters adapt, or something around the method does."""
        return bool(self.core.adapted) or self.core is not self.adapter


def inner(adapter: Adapter) -> Adapter:
    """The method inside guards and modes."""
    while isinstance(getattr(adapter, "adapter", None), nn.Module):
        adapter = adapter.adapter           # type: ignore[assignment]
    return adapter


def build(settings: Settings, device: torch.device) -> Served:
    """Network, posterior, method, what goes around it, and engine as set."""
    experiment, row = experiment_of(settings)
    opened = experiment.open(device)
    _check_shape(opened, settings)
    adapter, source = opened.adapter(row, settings.seed), opened.adapter(Row("source", "Source", "source"))
    distance = distance_from_start(inner(adapter))
    unit_pixels = expected_input(opened.model) == UNIT_PIXELS

    def fresh() -> Adapter:
        return opened.plain_adapter(row, settings.seed)

    policy = getattr(adapter, "policy", None) if "guard" in row.wraps else None
    return Served(adapter, source, fresh, settings.method, experiment.classes or 0, unit_pixels, distance, policy)


def experiment_of(settings: Settings) -> tuple[Experiment, Row]:
    """The settings as an experiment without a stream, and the row that is served."""
    if settings.recipe is None and settings.network is None and settings.source is None:
        choices = "--demo, --source FOLDER, or --recipe cifar10 or --network wrn-40-2, with --weights"
        raise ConfigError(f"say what to serve: {choices}")
    known = None if settings.recipe is None else recipe(settings.recipe)
    network = settings.network or (known.network if known else "")
    classes = settings.classes or (known.classes if known else len(settings.labels) or 10)
    if settings.source is not None:
        classes = settings.classes or read_config(settings.source).classes
    elif settings.weights is None and not is_function(network):
        raise ConfigError(f"give the weights of {network}: --weights, made by `petal fit` or published")
    if settings.labels and len(settings.labels) != classes:
        raise ConfigError(f"there are {len(settings.labels)} labels for {classes} classes")
    experiment = Experiment(
        settings.recipe, batch_size=settings.batch_size, network=settings.network,
        engine=settings.engine, fidelity=settings.fidelity, classes=classes, input=settings.input,
        plugin=None if settings.plugin is None else str(settings.plugin),
        weights=None if settings.weights is None else str(settings.weights),
        source=None if settings.source is None else str(settings.source),
    )  # fmt: skip
    (row,) = experiment.rows([_row_name(settings)], [*settings.set, *_guard_settings(settings)])
    if settings.posterior is not None and takes_posterior(METHODS[row.method]):
        experiment = replace(experiment, posterior=str(settings.posterior))
    kinds = [METHODS[row.method], *(WRAPPERS[name] for name in row.wraps)]
    if settings.statistics is not None and any(map(needs_statistics, kinds)):
        experiment = replace(experiment, statistics=str(settings.statistics))
    return experiment, row


def _row_name(settings: Settings) -> str:
    """The method with what goes around it: as named (`petal+guard`), and by settings of its own."""
    name, *around = settings.method.split("+")
    asked = {"small": settings.small_batch, "guard": settings.guard is not None}
    added = [wrapper for wrapper, wanted in asked.items() if wanted and wrapper not in around]
    return "+".join([name, *(sorted([*around, *added], key=list(WRAPPERS).index) if added else around)])


def _guard_settings(settings: Settings) -> list[str]:
    """What `guard` and `guard_set` say, as settings of the row's guard."""
    if settings.guard_set and settings.guard is None and "guard" not in settings.method.split("+"):
        raise ConfigError("guard_set without a guard: give its policy, such as --guard rollback")
    for text in settings.guard_set:
        if "=" not in text:
            raise ConfigError(f"guard_set is written OPTION=VALUE, got {text!r}")
    policy = [] if settings.guard is None else [f"policy={settings.guard}"]
    return [f"guard.{text}" for text in (*policy, *settings.guard_set)]


def warm_up(served: Served, settings: Settings) -> None:
    """Let a GPU compile its programs before the first request; the adapter's state is as it was afterwards."""
    adapter = served.adapter
    if adapter.device.type != "cuda":
        return
    x = torch.rand(settings.batch_size, *settings.input, device=adapter.device)
    with kept(adapter):
        for _ in range(3):
            adapter(x)
        adapter.predict(x)
        served.source.predict(x)


@contextmanager
def kept(adapter: Adapter) -> Any:
    """The adapter's state afterwards is what it was before, exactly."""
    state = adapter.state_dict()
    try:
        yield
    finally:
        adapter.load_state_dict(state)


def _check_shape(opened: OpenExperiment, settings: Settings) -> None:
    """A network that cannot take the samples is found out now and not by the first request."""
    source = Source(opened.model)
    x = torch.zeros(2, *settings.input, device=source.device, dtype=source.dtype)
    try:
        source.predict(x)
    except InputError as error:
        raise ConfigError(f"the network cannot take samples of shape {list(settings.input)} (--input): {error}") from error
