"""The published orders in which corruptions arrive, as data (`orders.json`)."""

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources

from petal.errors import DataError


@cache
def _published() -> dict[str, tuple[tuple[str, ...], ...]]:
    text = resources.files("petal.data").joinpath("orders.json").read_text(encoding="utf-8")
    return {name: tuple(tuple(names) for names in numbered) for name, numbered in json.loads(text).items()}


def order_names() -> dict[str, int]:
    """Every published family of orders and how many it has.

    >>> order_names()
    {'standard-15': 1, 'imagenet-c': 10, 'imagenet-3dcc': 10, 'cifar10-gradual': 10}
    """
    return {name: len(numbered) for name, numbered in _published().items()}


def order(name: str = "standard-15", number: int = 1) -> tuple[str, ...]:
    """The `number`-th published order of the family `name`, counted from 1 as the papers do.

    >>> order("imagenet-c", 3)[:2]
    ('contrast', 'defocus_blur')
    """
    families = order_names()
    if name not in families:
        known = ", ".join(f"{family} (1..{count})" for family, count in families.items())
        raise DataError(f"no published order is called {name!r}; there are {known}")
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= families[name]:
        raise DataError(f"{name} has orders 1..{families[name]}, not {number!r}")
    return _published()[name][number - 1]


def resolve_order(wanted: str | Sequence[str]) -> tuple[str, ...]:
    """The corruption names meant by `wanted`: names as they are, `"imagenet-c:3"`, `"standard-15"` or one name.

    >>> resolve_order("cifar10-gradual:2")[0], resolve_order("fog"), resolve_order(["fog", "snow"])
    ('jpeg_compression', ('fog',), ('fog', 'snow'))
    """
    if isinstance(wanted, str):
        family, colon, number = wanted.partition(":")
        if colon:
            if not number.isdecimal():
                raise DataError(f"an order is written NAME:NUMBER, for example imagenet-c:3; got {wanted!r}")
            return order(family, int(number))
        return order(family) if family in order_names() else (family,)
    names = tuple(wanted)
    if not names:
        raise DataError("the order is empty; give at least one corruption name")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise DataError(f"an order is a sequence of corruption names; got {wrong[0]!r} in it")
    return names
