"""What a dataset is here: numbered images with labels, read by lists of indices.

Shapes: x float32 [n, 3, H, W] in [0, 1]; y int64 [n]; indices int64 [n].
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petal.errors import DataError

MANIFEST = "petal.json"         # in a folder that `petal corrupt` wrote: from what data, and how

Indices = Tensor | NDArray[np.integer[Any]] | Sequence[int]


class Dataset(ABC):
    """Numbered images with labels. A subclass says its length, its labels and how to read some of its images.

    `name` identifies the data in reports, `classes` are the class names where they are known.
    """

    name: str
    classes: tuple[str, ...] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """All labels, int64 [len]; images are not read for them where the format allows."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The images and labels of checked `indices`: what a subclass writes."""

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Images float32 [n, 3, H, W] in [0, 1] and labels int64 [n] of `indices`, in their order."""
        numbers = np.asarray(indices)
        if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
            raise DataError(f"indices of {self.name} must be whole numbers in one dimension; got {numbers.dtype}"
                            f" of shape {list(numbers.shape)}")
        if numbers.size and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise DataError(f"{self.name} has images 0..{len(self) - 1}; asked for {numbers.min()}..{numbers.max()}")
        return self.read(numbers.astype(np.int64))

    def fingerprint(self) -> dict[str, Any]:
        """Enough (JSON) to notice that a resumed run reads other data; no path, so that data may move."""
        return {"name": self.name, "images": len(self), "labels": self._label_sum}

    @cached_property
    def _label_sum(self) -> int | None:
        return zlib.crc32(self.labels.numpy().tobytes())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self)} images>"


class CorruptedDataset(Dataset):
    """A benchmark that ships its images already corrupted: image i is the same picture in every corruption.

    `corrupted(name, severity)` is the dataset of one corruption; there are no clean images to read.
    """

    default_order: str = "standard-15"

    @abstractmethod
    def corrupted(self, name: str, severity: int) -> Dataset:
        """The images of one corruption at severity 1..5."""

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Refused: images exist only under a corruption."""
        raise DataError(f"{self.name} holds corrupted images only; read one corruption with .corrupted(name, severity)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `petal corrupt` noted in a folder that it wrote; empty for other folders."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["data"]["name"], content["size"][1], content["layout"]      # the least that is relied on
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: not what petal writes there ({error}); remove it to read the folder as it is") from error
    return dict(content)


def check_severity(severity: int) -> int:
    """`severity` if it is a whole number from 1 to 5."""
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise DataError(f"a severity is a whole number from 1 to 5; got {severity!r}")
    return severity


def check_whole(what: str, value: int, least: int) -> int:
    """`value` if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{what} must be a whole number of at least {least}; got {value!r}")
    return value


def check_labels(labels: NDArray[Any], count: int, classes: int | None, where: str) -> NDArray[Any]:
    """`labels` if there are `count` of them, whole numbers in 0..classes-1."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where}: expected whole-number labels in one dimension, found {labels.dtype}"
                        f" of shape {list(labels.shape)}")
    if len(labels) != count:
        raise DataError(f"{where}: expected {count} labels, one per image; found {len(labels)}")
    if count:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or (classes is not None and high >= classes):
            limit = "0 or more" if classes is None else f"0..{classes - 1}"
            raise DataError(f"{where}: labels must be {limit}; found {low if low < 0 else high}")
    return labels


def to_unit(images: NDArray[Any], where: str) -> Tensor:
    """uint8 or float images [n, H, W, 3] or [n, 3, H, W] as float32 [n, 3, H, W] in [0, 1]."""
    if channels_last(images.shape, where):
        images = images.transpose(0, 3, 1, 2)
    x = torch.from_numpy(np.ascontiguousarray(images))
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    x = x.float()
    if x.numel() and not bool(((x >= 0) & (x <= 1)).all()):                     # not-a-number fails this too
        raise DataError(f"{where}: float images must lie in [0, 1]; found values from {float(x.min()):g}"
                        f" to {float(x.max()):g}")
    return x


def channels_last(shape: Sequence[int], where: str) -> bool:
    """True if colour is the last of four axes; an error where neither layout fits."""
    if len(shape) == 4 and shape[3] == 3:
        return True
    if len(shape) == 4 and shape[1] == 3:
        return False
    raise DataError(f"{where}: expected colour images [N, H, W, 3] or [N, 3, H, W]; found shape {list(shape)}")


class ArrayDataset(Dataset):
    """Images held in an array, in memory or mapped from a file: uint8, or float in [0, 1]; either layout."""

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        *,
        name: str,
        classes: Sequence[str] | None = None,
        where: str | None = None,
    ) -> None:
        self.name = name
        self.classes = None if classes is None else tuple(classes)
        self.where = where or name
        channels_last(images.shape, self.where)
        if images.dtype != np.uint8 and images.dtype not in (np.float16, np.float32, np.float64):
            raise DataError(f"{self.where}: expected uint8 images, or float in [0, 1]; found {images.dtype}")
        self._images = images
        self._labels = check_labels(labels, len(images), None if classes is None else len(classes), self.where)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [len]."""
        return torch.from_numpy(np.array(self._labels, dtype=np.int64))

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Only the rows asked for are touched, so a mapped file is never read as a whole."""
        x = to_unit(np.asarray(self._images[indices]), self.where)
        return x, torch.from_numpy(np.asarray(self._labels[indices], dtype=np.int64))


def from_arrays(
    images: Tensor | NDArray[Any],
    labels: Tensor | NDArray[Any] | Sequence[int],
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
) -> ArrayDataset:
    """A dataset of images in memory: uint8, or float in [0, 1]; [N, H, W, 3] or [N, 3, H, W].

    >>> data = from_arrays(torch.zeros(4, 3, 32, 32), [0, 1, 0, 1])
    >>> x, y = data.batch([3, 0])
    >>> tuple(x.shape), y.tolist()
    ((2, 3, 32, 32), [1, 0])
    """
    as_array = [v.detach().cpu().numpy() if isinstance(v, Tensor) else np.asarray(v) for v in (images, labels)]
    return ArrayDataset(as_array[0], as_array[1], name=name, classes=classes)
