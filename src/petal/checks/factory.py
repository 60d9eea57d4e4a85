"""How adapters to be checked are made: from a class or a function, with what its signature asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from petal.checkpoint import digest
from petal.checks.networks import images
from petal.collect import collect_statistics
from petal.methods import Adapter
from petal.posterior import DiagonalGaussian
from petal.statistics import SourceStatistics

# with these a check is a much shorter one, and samples count on networks that are sure of nothing
QUICK = {"views": 2, "margin": 1.0, "plpd": -1.0}
AROUND = {"memory": 12, "every": 12}    # what goes around a method learns from memories of the size of a batch

_statistics: dict[str, SourceStatistics] = {}


class Factory:
    """Makes adapters of a method: `Factory(Mine)(model, seed=3)`.

    `method` is a class, or a function from a network to an adapter. A parameter `posterior` gets an isotropic posterior, one
    called `statistics` the statistics of a few made images; `options` are further settings. An option that is given in a
    call is passed on if the signature names it (`takes`), or hands options it does not name to a base class. `around` are
    wrappers, from the inside out.

    >>> import petal
    >>> from petal.checks.networks import network
    >>> make = Factory(petal.Petal, around=[petal.Guard])
    >>> make(network("vit"), views=2).kind, make.takes("lr"), make.takes("speed")
    ('Guard(Petal)', True, False)
    """

    def __init__(
        self, method: Callable[..., Adapter], around: Sequence[Callable[[Adapter], Adapter]] = (), **options: Any
    ) -> None:
        self.method, self.around, self.options = method, tuple(around), options
        self.parameters, self.open = parameters_of(method)

    def takes(self, name: str) -> bool:
        """True if the method has this setting."""
        return self.open or name in self.parameters

    def __call__(self, model: nn.Module, **options: Any) -> Adapter:
        """An adapter of this network, with those of the options that the method has."""
        given = QUICK | self.options | options
        settings = {name: value for name, value in given.items() if self.takes(name) or name in self.options}
        if "posterior" in self.parameters:
            settings.setdefault("posterior", DiagonalGaussian.isotropic(model, std=0.05))
        if "statistics" in self.parameters and "statistics" not in settings:
            settings["statistics"] = statistics_of(model)
        adapter = self.method(model, **settings)
        for wrapper in self.around:
            known = parameters_of(wrapper)[0]
            adapter = wrapper(adapter, **(AROUND if AROUND.keys() <= known.keys() else {}))
        return adapter


def parameters_of(method: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """The parameters of a method by name, and whether it takes any other as well.

    Where a constructor takes **options, they are those of the next constructor among its base classes.
    """
    found: dict[str, inspect.Parameter] = {}
    signatures = [inspect.signature(method)]
    if isinstance(method, type):
        signatures = [inspect.signature(vars(base)["__init__"]) for base in method.__mro__ if "__init__" in vars(base)]
    for signature in signatures:
        named = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        found = named | found
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            return found, False
    return found, True


def statistics_of(model: nn.Module) -> SourceStatistics:
    """Source statistics of made images, kept for networks with the same weights."""
    tensors = {f"{name} {type(model).__name__}": tensor for name, tensor in model.state_dict().items()}
    key = digest(tensors)
    if key not in _statistics:
        dtype = next(model.parameters()).dtype
        batches = [images(32, seed=seed, dtype=dtype) for seed in range(1000, 1004)]
        _statistics[key] = collect_statistics(model, batches, labels="predicted")
    return _statistics[key]
