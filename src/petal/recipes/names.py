"""Errors that say what was probably meant."""

import difflib
from collections.abc import Iterable

from petal.errors import ConfigError


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with close matches and all there are.

    >>> print(unknown("recipe", "cifr10", ["cifar10", "digits"]))
    there is no recipe 'cifr10'; did you mean cifar10? (there are: cifar10, digits)
    """
    known = list(known)
    close = difflib.get_close_matches(name.lower().replace("_", "-"), [k.replace("_", "-") for k in known], n=3, cutoff=0.5)
    meant = [k for k in known if k.replace("_", "-") in close]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ";"
    return ConfigError(f"there is no {what} {name!r}{hint} (there are: {', '.join(known)})")
