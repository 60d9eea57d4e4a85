"""Names of the sources that images come from: order means order within one of them."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from petal.errors import InputError

Key = str | int | None                      # of a source of images; None for images without a key
Keys = Key | Sequence[Key] | NDArray[Any] | Tensor


def rows_by_key(stream: Keys, count: int) -> dict[Key, NDArray[np.int64]]:
    """The numbers of the images of each source, in order; `stream` is one key, or one for each of `count` images.

    >>> rows_by_key(["left", "right", "left"], 3)
    {'left': array([0, 2]), 'right': array([1])}
    """
    if stream is None or isinstance(stream, (str, int, np.integer)):
        return {_key(stream): np.arange(count)}
    keys = stream.tolist() if isinstance(stream, (Tensor, np.ndarray)) else stream
    if not isinstance(keys, Sequence) or len(keys) != count:
        size = f"{len(keys)} keys" if isinstance(keys, Sequence) else repr(keys)
        raise InputError(f"stream is one key, or one for each of the {count} images; got {size}")
    found: dict[Key, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(_key(key), []).append(number)
    return {key: np.array(numbers) for key, numbers in found.items()}


def last(stream: Keys, count: int) -> Keys:
    """The keys of the last `count` images of a batch.

    >>> last(["left", "right", "left"], 2), last("left", 2)
    (['right', 'left'], 'left')
    """
    return stream if stream is None or isinstance(stream, (str, int, np.integer)) else stream[-count:]


def _key(key: Any) -> Key:
    if isinstance(key, bool) or not (key is None or isinstance(key, (str, Integral))):
        raise InputError(f"the key of a stream is a text or a whole number, got {key!r}")
    return key if key is None or isinstance(key, str) else int(key)
