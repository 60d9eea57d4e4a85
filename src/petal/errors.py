"""What can go wrong, by name. Every message says what was given and what to do instead."""


class PetalError(Exception):
    """Anything `petal` raises on purpose; the command line prints its message and no traceback."""


class InputError(PetalError, ValueError):
    """A batch that a method refuses. The method's state is as it was before the call."""


class PosteriorError(PetalError, ValueError):
    """A posterior that does not fit itself, its file or the network it is used with."""


class DataError(PetalError, ValueError):
    """A dataset, stream or corruption that cannot be read or made as asked."""


class ModelError(PetalError, ValueError):
    """A network that cannot be built, or weights that do not fit it."""


class ConfigError(PetalError, ValueError):
    """A setting, method or recipe that does not exist or has no meaning."""


class StorageError(PetalError):
    """A file that cannot be written. What was there before is as it was."""


class PetalWarning(UserWarning):
    """Something that is allowed but probably not what was meant."""
