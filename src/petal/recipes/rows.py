"""The rows of the paper's tables: a name, a method, and its settings in a recipe and a fidelity."""

import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from torch import nn

from petal.augment import Views
from petal.errors import ConfigError
from petal.guard import Guard
from petal.methods import ASR, METHODS, Adapter, Ordered, Petal, Reservoir, Robust, Screen, SmallBatch, Wrapper
from petal.models import NETWORKS
from petal.recipes.field import field
from petal.recipes.names import unknown
from petal.recipes.published import Recipe
from petal.recipes.row import Row
from petal.recommended import flagship
from petal.restore import Fisher, Stochastic

FIDELITIES = ("official", "paper")
TABLE_1 = ("source", "bn", "pseudo-label", "tent-online", "tent", "cotta", "petal-sres", "petal")
WRAPPERS: dict[str, type[Wrapper]] = {                                             # from the inside out
    "asr": ASR, "reservoir": Reservoir, "robust": Robust, "small": SmallBatch, "order": Ordered, "screen": Screen,
    "guard": Guard,
}  # fmt: skip

__all__ = ["FIDELITIES", "TABLE_1", "WRAPPERS", "Row", "load_plugin", "pick_rows", "rows"]


def rows(recipe: Recipe, fidelity: str = "official") -> dict[str, Row]:
    """Every row there is, by name: those of the paper, its ablations, and one for each further method.

    `official` is the released code (one decision per batch, mean of logits), `paper` the text (one per sample, mean of
    probabilities). CoTTA follows along: it is PETAL without the prior.

    >>> from petal.recipes.published import cifar10
    >>> rows(cifar10(), "official")["petal"].options["gate"], rows(cifar10(), "paper")["petal"].options["gate"]
    ('batch', 'sample')
    """
    if fidelity not in FIDELITIES:
        raise unknown("fidelity", fidelity, FIDELITIES)
    official = fidelity == "official"
    affine: dict[str, Any] = {"lr": recipe.affine_lr, "optimizer": recipe.affine_optimizer}
    teacher: dict[str, Any] = {
        "lr": recipe.lr,
        "optimizer": recipe.optimizer,
        "ema": recipe.ema,
        "views": recipe.views,
        "confidence": recipe.confidence,
        "augment": recipe.augment,
        "gate": "batch" if official else "sample",
        "average": "logits" if official else "probs",
        "loss": recipe.official_loss if official else "cross-entropy",
    }
    stochastic = {"restore": Stochastic(recipe.stochastic)}
    petal = {**teacher, "prior_weight": recipe.prior_weight, "restore": Fisher(recipe.quantile)}
    own = frozenset({"restore"})
    best = flagship(Views() if recipe.augment is None else Views(flip=recipe.augment.flip))    # else the same everywhere
    known = [
        Row("source", "Source", "source", random=False),
        Row("bn", "BN Adapt", "bn", random=False),
        Row("pseudo-label", "Pseudo-label", "pseudo-label", affine, random=False),
        Row("tent-online", "TENT-online", "tent", affine, reset_on_domain_change=True, random=False),
        Row("tent", "TENT-continual", "tent", affine, random=False),
        Row("cotta", "CoTTA", "cotta", {**teacher, **stochastic}),
        Row("petal-sres", "PETAL (S-Res)", "petal", {**petal, **stochastic}, own),
        Row("petal", "PETAL (FIM)", "petal", petal),
        Row("petal-none", "PETAL (no restore)", "petal", {**petal, "restore": None}, own),
        Row("petal-sres-0.03", "PETAL (S-Res, 0.03)", "petal", {**petal, "restore": Stochastic(0.03)}, own),
        Row("petal-f", "PETAL (F)", "petal", best, frozenset(best)),
    ]
    out = {row.name: row for row in [*known, *field(recipe)]}
    for name, method in METHODS.items():
        if name not in out:
            title = name if method.card is None else method.card.title
            out[name] = Row(name, title, name, random="seed" in inspect.signature(method.__init__).parameters)
    return out


def own_defaults() -> dict[str, Row]:
    """Every method with its own defaults, whatever the benchmark."""
    return {name: Row(name, name, name) for name in METHODS}


def pick_rows(known: Mapping[str, Row], wanted: Sequence[str]) -> list[Row]:
    """The rows meant, each once: `petal`, or with something around it, `petal+guard` or `petal+small+guard`.

    >>> from petal.recipes.published import cifar10
    >>> [(row.name, row.label) for row in pick_rows(rows(cifar10()), ["bn", "petal+small+guard"])]
    [('bn', 'BN Adapt'), ('petal+small+guard', 'PETAL (FIM) + small + guard')]
    """
    return [_pick(known, name) for name in dict.fromkeys(wanted)]


def _pick(known: Mapping[str, Row], wanted: str) -> Row:
    name, *around = wanted.split("+")
    if name not in known:
        raise unknown("method", name, known)
    for wrapper in around:
        if wrapper not in WRAPPERS:
            raise unknown("addition to a method", wrapper, WRAPPERS)
    order = [wrapper for wrapper in WRAPPERS if wrapper in around]
    if order != around:
        right = "+".join([name, *order])
        raise ConfigError(f"{wanted!r}: what goes around a method is given once and from the inside out: {right}")
    row, cards = known[name], {wrapper: WRAPPERS[wrapper].card for wrapper in around}
    label = " + ".join([row.label, *(wrapper if card is None else card.title for wrapper, card in cards.items())])
    random = row.random or any(card is not None and card.random for card in cards.values())
    return replace(row, name=wanted, label=label, random=random, wraps=tuple(around)) if around else row


def takes_posterior(method: type[Adapter]) -> bool:
    """True if the constructor of a method takes the source posterior."""
    return issubclass(method, Petal) or "posterior" in inspect.signature(method.__init__).parameters


def needs_posterior(row: Row) -> bool:
    """True if a row cannot do without the source posterior: PETAL can without its prior."""
    method = METHODS[row.method]
    if not takes_posterior(method):
        return False
    given = inspect.signature(method.__init__).parameters.get("posterior")
    optional = given is None or given.default is not given.empty
    return not (optional and issubclass(method, Petal) and not row.options.get("prior_weight", 1.0))


def needs_statistics(method: type[Adapter]) -> bool:
    """True if the constructor of a method takes source statistics."""
    return "statistics" in inspect.signature(method.__init__).parameters


class _AsItIs(SourceFileLoader):
    """Runs a file as it is now: kept bytecode would pass for that of a file changed within the same second."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@dataclass(frozen=True)
class _Added:
    """What a plugin added, by name."""

    methods: dict[str, type[Adapter]]
    networks: dict[str, Callable[..., nn.Module]]

    def there(self) -> bool:
        """True while all of it is."""
        tables: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(METHODS, self.methods), (NETWORKS, self.networks)]
        return all(known.get(name) is made for known, mine in tables for name, made in mine.items())


_loaded: dict[tuple[Path, str], _Added] = {}            # by path and hash


def load_plugin(path: str | Path) -> dict[str, str]:
    """Run a user's file, which adds methods to `petal.METHODS` or networks to `petal.models.NETWORKS`.

    Returns its path and hash, and what it adds; an error if that is nothing. A file that was run before and has not changed
    is not run again.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no plugin at {path}: give a Python file that adds to petal.METHODS or petal.models.NETWORKS")
    key = path.resolve(), hashlib.sha256(path.read_bytes()).hexdigest()
    added = _loaded.get(key)
    if added is None or not added.there():
        added = _loaded[key] = _run_plugin(path)
    found = {"methods": ", ".join(sorted(added.methods)), "networks": ", ".join(sorted(added.networks))}
    return {"path": str(path), "sha256": key[1], **{what: names for what, names in found.items() if names}}


def _run_plugin(path: Path) -> _Added:
    """What it adds."""
    before, networks = dict(METHODS), dict(NETWORKS)
    name = f"petal_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIs(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file: a plugin is one, named .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise ConfigError(f"the plugin {path} fails: {type(error).__name__}: {error}") from error
    added = {key: method for key, method in METHODS.items() if method is not before.get(key)}
    wrong = [key for key, method in added.items() if not (isinstance(method, type) and issubclass(method, Adapter))]
    if wrong:
        METHODS.pop(wrong[0])
        raise ConfigError(f"the plugin {path} adds {wrong[0]!r}, which is not a class derived from petal.Adapter")
    made = {key: network for key, network in NETWORKS.items() if network is not networks.get(key)}
    bad = [key for key, network in made.items() if not callable(network)]
    if bad:
        NETWORKS.pop(bad[0])
        raise ConfigError(f"the plugin {path} adds the network {bad[0]!r}, which is no function of `classes`")
    if not (added or made):
        raise ConfigError(
            f'the plugin {path} adds no method and no network: end it with petal.METHODS["mine"] = Mine, or with '
            'petal.models.NETWORKS["mine"] = Mine'
        )
    return _Added(added, made)
