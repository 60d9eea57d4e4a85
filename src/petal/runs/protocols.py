"""Protocols: how an evaluation is done, by one name that fixes everything about its stream.

    petal run cifar10 --protocol table1-2000

Numbers in papers differ because of the number of images, their order, the severity, a reset between domains, or answers
from after the update. A protocol names all of it; tables print it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from petal.errors import ConfigError
from petal.recipes.names import unknown
from petal.recipes.published import Recipe

NOTHING: Mapping[str, Any] = {              # what a protocol fixes, and how it is where the protocol does not say
    "images": None, "visits": None, "label_correlation": None, "stretch": None, "alternate": None, "sources": None,
    "mean_run": None, "frames": None, "stream": None, "shuffle": False, "reset_per_domain": False, "after": False,
    "rate": None,
}  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """What it is called and fixes. No `recipes`: it fits every continual one; no `orders`: those of the recipe."""

    name: str
    about: str
    recipes: tuple[str, ...] = ()
    orders: tuple[int, ...] | None = (1,)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fixes(self, recipe: Recipe) -> dict[str, Any]:
        """Every setting of an experiment that the protocol decides, for a recipe; an error if it is not for it.

        >>> from petal.recipes.published import cifar10
        >>> fixed = protocol("table1-2000").fixes(cifar10())
        >>> fixed["images"], fixed["severity"], fixed["batch_size"], fixed["shuffle"]
        (2000, 5, 200, False)
        """
        if self.recipes and recipe.name not in self.recipes:
            own = " and ".join(self.recipes)
            raise ConfigError(f"protocol {self.name} is one of {own}, not of {recipe.name}: `petal protocols` lists others")
        if not self.recipes and recipe.stream != "continual":
            raise ConfigError(f"protocol {self.name} changes a continual stream; that of {recipe.name} is {recipe.stream}")
        settings = {**NOTHING, "severity": recipe.severity, "batch_size": recipe.batch_size, **self.settings}
        if settings["severity"] is not None and recipe.severity is None:
            raise ConfigError(f"{recipe.name} goes through all severities: protocol {self.name} cannot fix one")
        return settings

    def settle(self, recipe: Recipe, given: Mapping[str, Any], unset: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of an experiment under it. What is `given`, so not as in `unset`, and contradicts is refused.

        >>> from petal.recipes.published import cifar10
        >>> protocol("table1").settle(cifar10(), {"images": 500}, {"images": None})
        Traceback (most recent call last):
        ...
        petal.errors.ConfigError: protocol table1 contradicts --images 500: it has all images. Leave out one of the two
        """
        fixed = self.fixes(recipe)
        wrong = [name for name, value in fixed.items()
                 if name in given and given[name] != unset.get(name) and given[name] != value]  # fmt: skip
        if wrong:
            options = [f"--{name.replace('_', '-')} {given[name]}: it has {_said(name, fixed[name])}" for name in wrong]
            told = "; ".join(options)
            raise ConfigError(f"protocol {self.name} contradicts {told}. Leave out one of the two")
        return fixed

    def orders_of(self, recipe: Recipe, asked: Sequence[int]) -> list[int]:
        """The orders to run: those asked for if the protocol has them, else all of its own."""
        own = list(self.orders or recipe.numbers)
        if wrong := [number for number in asked if number not in own]:
            listed = ", ".join(map(str, own))
            raise ConfigError(f"protocol {self.name} contradicts --order {wrong[0]}: its orders are {listed}")
        return list(asked) or own


def _said(name: str, value: Any) -> str:
    """A fixed setting in words.

    >>> _said("images", None), _said("visits", None), _said("batch_size", 64)
    ('all images', 'none', '64')
    """
    if name == "images" and value is None:
        return "all images"
    return "none" if value is None or value is False else str(value)


PROTOCOLS: dict[str, Protocol] = {
    known.name: known
    for known in (
        Protocol("table1", "the paper's Table 1: CIFAR-10-C, continual, order 1, severity 5, all images", ("cifar10",)),
        Protocol("table2", "the paper's Table 2: CIFAR-100-C, continual, order 1, severity 5, all images", ("cifar100",)),
        Protocol("gradual", "the paper's Table 3: CIFAR-10-C, severity rises and falls, ten orders, all images",
                 ("cifar10-gradual",), None),
        Protocol("imagenet-c", "the paper's Table 5: ImageNet-C, continual, ten orders, severity 5, all images",
                 ("imagenet",), None),
        Protocol("imagenet-3dcc", "the paper's Table 6: ImageNet-3DCC, continual, ten orders, severity 5, all images",
                 ("imagenet-3dcc",), None),
        Protocol("continual", "any benchmark: continual, order 1, all images, the recipe's severity and batch size"),
        Protocol("reset-per-domain", "the same, and every method starts anew when the domain changes",
                 settings={"reset_per_domain": True}),
        Protocol("after-update", "the same as continual, and the answers are of after the update", settings={"after": True}),
        Protocol("equal-time", "the same as continual, and the stream comes at the source network's speed",
                 settings={"rate": 1.0}),
        Protocol("recurring-10", "the domains come ten times, in order 1", settings={"visits": 10}),
        Protocol("batch-64", "continual with batches of 64", settings={"batch_size": 64}),
        Protocol("batch-10", "continual with batches of 10", settings={"batch_size": 10}),
        Protocol("batch-1", "continual, one image at a time", settings={"batch_size": 1}),
        Protocol("dirichlet-0.1", "labels come in runs (Dirichlet 0.1), batches of 64",
                 settings={"label_correlation": 0.1, "batch_size": 64}),
        Protocol("dirichlet-0.1-batch-10", "labels come in runs (Dirichlet 0.1), batches of 10",
                 settings={"label_correlation": 0.1, "batch_size": 10}),
        Protocol("dirichlet-0.1-batch-1", "labels come in runs (Dirichlet 0.1), one image at a time",
                 settings={"label_correlation": 0.1, "batch_size": 1}),
    )
}  # fmt: skip


def protocol(name: str) -> Protocol:
    """The protocol of a name; behind it may stand a severity and how many images of every domain it takes.

    >>> protocol("table1-s3-2000").settings, protocol("recurring-10-100").settings
    ({'severity': 3, 'images': 2000}, {'visits': 10, 'images': 100})
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    found = re.fullmatch(r"(.+?)(?:-s([1-5]))?(?:-([1-9]\d*))?", name)
    if found is None or found[1] not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    known, more, about = PROTOCOLS[found[1]], dict[str, Any](), ""
    if found[2]:
        more["severity"], about = int(found[2]), f", at severity {found[2]}"
    if found[3]:
        more["images"], about = int(found[3]), f"{about}, the first {int(found[3]):,} images of each domain"
    return replace(known, name=name, about=known.about + about, settings={**known.settings, **more})
