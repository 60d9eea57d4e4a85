"""What is served: the adapter with its guard, and the frozen source beside it."""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import petal
from petal import models
from petal.engine import accelerate, policy_for
from petal.errors import ConfigError
from petal.methods import METHODS, Adapter, Source
from petal.models.pixels import UNIT_PIXELS, expected_input
from petal.posterior import DiagonalGaussian
from petal.recipes import Row, apply_settings, load_plugin, parse_value, recipe, rows
from petal.recipes.names import unknown
from petal.recipes.rows import needs_posterior
from petal.recipes.run import distance_from_start
from petal.serve.settings import Settings

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

    @property
    def core(self) -> Adapter:
        """The method itself, without what is around it."""
        return inner(self.adapter)

    @property
    def learns(self) -> bool:
        """Whether calls change anything: some parameters adapt, or something around the method does."""
        return bool(self.core.adapted) or self.core is not self.adapter


def inner(adapter: Adapter) -> Adapter:
    """The method inside guards and modes."""
    while isinstance(getattr(adapter, "adapter", None), nn.Module):
        adapter = adapter.adapter           # type: ignore[assignment]
    return adapter


def build(settings: Settings, device: torch.device) -> Served:
    """Network, posterior, method, guard and engine as set."""
    if settings.plugin is not None:
        load_plugin(settings.plugin)
    network, options = settings.network, {}
    classes = settings.classes
    known = _plain_rows()
    if settings.recipe is not None:
        chosen = recipe(settings.recipe)
        known = rows(chosen, settings.fidelity)
        classes = classes or chosen.classes
        if network is None:
            network, options = chosen.network, dict(chosen.network_options)
    if network is None:
        raise ConfigError("say what to serve: --demo, --recipe cifar10 or --network wrn-40-2, with --weights")
    if settings.weights is None:
        raise ConfigError(f"give the weights of {network}: --weights, made by `petal fit` or published")
    if settings.method not in known:
        raise unknown("method", settings.method, known)
    row = apply_settings(known, settings.set)[settings.method]
    classes = classes or len(settings.labels) or 10
    if settings.labels and len(settings.labels) != classes:
        raise ConfigError(f"there are {len(settings.labels)} labels for {classes} classes")
    model = models.build(network, classes, settings.weights, **options).to(device)
    posterior = _posterior(settings, row, model)

    def fresh() -> Adapter:
        return wrapped(_adapter(row, model, posterior, settings.seed), settings)

    source = Source(model)
    _check_shape(source, settings)
    adapter = fresh()
    distance = distance_from_start(inner(adapter))
    for one in (adapter, source):
        _accelerate(one, settings)
    return Served(adapter, source, fresh, row.name, classes, expected_input(model) == UNIT_PIXELS, distance)


def wrapped(adapter: Adapter, settings: Settings) -> Adapter:
    """The adapter in its small-batch mode and its guard, where they are asked for."""
    out: Any = adapter
    if settings.small_batch:
        out = petal.SmallBatch(out)
    if settings.guard is not None:
        options = {}
        for text in settings.guard_set:
            name, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"guard_set is written OPTION=VALUE, got {text!r}")
            options[name.strip()] = parse_value(value)
        try:
            out = petal.Guard(out, policy=settings.guard, **options)
        except TypeError as error:
            raise ConfigError(f"guard_set: {error}") from error
    elif settings.guard_set:
        raise ConfigError("guard_set without a guard: give its policy, such as --guard rollback")
    return out      # type: ignore[no-any-return]


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


def _plain_rows() -> dict[str, Row]:
    """Every method with its own defaults."""
    return {name: Row(name, name, name) for name in METHODS}


def _posterior(settings: Settings, row: Row, model: nn.Module) -> DiagonalGaussian | None:
    if not needs_posterior(METHODS[row.method]):
        return None
    if settings.posterior is None:
        raise ConfigError(f"{row.name} needs the source posterior: make one with `petal fit`, give it as --posterior")
    q = DiagonalGaussian.load(settings.posterior)
    q.check(model)
    return q


def _adapter(row: Row, model: nn.Module, posterior: DiagonalGaussian | None, seed: int) -> Adapter:
    method = METHODS[row.method]
    arguments: list[Any] = [model] if posterior is None else [model, posterior]
    options = dict(row.options)
    if "seed" in inspect.signature(method.__init__).parameters:
        options["seed"] = seed
    return method(*arguments, **options)


def _accelerate(adapter: Adapter, settings: Settings) -> None:
    """A GPU compiles the whole batch, which is what comes under load; a CPU nothing, as that stops service for seconds."""
    if adapter.device.type == "cuda":
        shape: Sequence[int] = (settings.batch_size, *settings.input)
        accelerate(adapter, settings.engine, batch_shape=shape)
    else:
        accelerate(adapter, settings.engine, policy=replace(policy_for(adapter.device), compile=False))


def _check_shape(source: Source, settings: Settings) -> None:
    """A network that cannot take the samples is found out now and not by the first request."""
    x = torch.zeros(2, *settings.input, device=source.device, dtype=source.dtype)
    try:
        source.predict(x)
    except petal.InputError as error:
        raise ConfigError(f"the network cannot take samples of shape {list(settings.input)} (--input): {error}") from error
