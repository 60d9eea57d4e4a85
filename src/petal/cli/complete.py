"""What shells complete: names of recipes, methods and networks."""

from collections.abc import Callable

from petal.models import LIBRARIES, NETWORKS
from petal.recipes import RECIPES, WRAPPERS, recipe, rows


def recipes(incomplete: str) -> list[str]:
    """Recipes that begin so.

    >>> recipes("cifar10")
    ['cifar10', 'cifar10-gradual', 'cifar100']
    """
    return sorted(name for name in RECIPES if name.startswith(incomplete))


def methods(incomplete: str) -> list[str]:
    """Rows that begin so; after a +, what can go around them, from the inside out.

    >>> methods("petal-s"), methods("eata+small+")
    (['petal-sres', 'petal-sres-0.03'], ['eata+small+guard', 'eata+small+order', 'eata+small+screen'])
    """
    *around, last = incomplete.split("+")
    if not around:
        return sorted(name for name in rows(recipe("cifar10")) if name.startswith(incomplete))
    order = list(WRAPPERS)
    inside = max((order.index(name) for name in around[1:] if name in order), default=-1)
    return sorted("+".join([*around, name]) for name in order[inside + 1 :] if name.startswith(last))


def networks(incomplete: str) -> list[str]:
    """Networks that begin so, and the libraries that have more.

    >>> networks("ti"), networks("small")
    (['timm:'], ['small', 'small-gn'])
    """
    return sorted(name for name in [*NETWORKS, *(f"{library}:" for library in LIBRARIES)] if name.startswith(incomplete))


BY_NAME: dict[str, Callable[[str], list[str]]] = {"recipe": recipes, "method": methods, "network": networks}
