"""What can go wrong, by name. Every message says what was given and what to do instead."""

import warnings
from collections.abc import Callable


class PetalError(Exception):
    """Anything `petal` raises on purpose; the command line prints its message and no traceback."""


class InputError(PetalError, ValueError):
    """A batch that a method refuses. The method's state is as it was before the call."""


class PosteriorError(PetalError, ValueError):
    """A posterior that does not fit itself, its file or the network it is used with."""


class StatisticsError(PetalError, ValueError):
    """Source statistics that do not fit themselves, their file or the network they are used with."""


class DataError(PetalError, ValueError):
    """A dataset, stream or corruption that cannot be read or made as asked."""


class ModelError(PetalError, ValueError):
    """A network that cannot be built, or weights that do not fit it."""


class ConfigError(PetalError, ValueError):
    """A setting, method or recipe that does not exist or has no meaning."""


class StorageError(PetalError):
    """A file that cannot be written. What was there before is as it was."""


class OutOfMemory(PetalError, RuntimeError):
    """The device has too little memory for what was asked. Where nothing else is said, the state is as it was."""


class DeviceLost(PetalError, RuntimeError):
    """The device failed, and all on it is gone: checkpoints on the disk are what there is."""


class PetalWarning(UserWarning):
    """Something that is allowed but probably not what was meant."""


def renamed(module: str, **now: type) -> Callable[[str], type]:
    """A `__getattr__` for a module in which classes have new names: the old ones still work, with a warning."""

    def find(name: str) -> type:
        if name not in now:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now called {now[name].__name__}", DeprecationWarning, stacklevel=2)
        return now[name]

    return find
