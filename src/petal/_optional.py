"""Packages that some things need and most do without."""

from importlib import import_module
from typing import Any

from petal.errors import ConfigError


def optional(module: str, what: str, extra: str) -> Any:
    """A module of a package that need not be there; an error that says what to install if it is not.

    >>> optional("json", "nothing", "none").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f"{what} needs {package}: pip install {package}, or 'petal-tta[{extra}]' ({error})") from error
