"""Any map-style torch dataset, and the digits that come with scikit-learn."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data as torch_data

from petal.data.dataset import ArrayDataset, Dataset, check_labels, from_arrays
from petal.errors import DataError


class TorchDataset(Dataset):
    """A map-style torch dataset whose items are (image, label).

    An image is a float tensor [3, H, W] in [0, 1], a uint8 tensor [3, H, W] or a PIL image; normalisation belongs in
    the model. Labels are taken from the dataset's `targets` where it has them unchanged, otherwise by reading every
    item once when something (a correlated stream) asks for all of them.
    """

    def __init__(
        self, data: torch_data.Dataset[Any], *, name: str | None = None, classes: Sequence[str] | None = None
    ) -> None:
        if isinstance(data, torch_data.IterableDataset) or not hasattr(data, "__len__"):
            raise DataError(f"{type(data).__name__} has no length or no order; a map-style torch dataset is needed")
        self.data = data
        self.name = name or type(data).__name__.lower()
        known = classes if classes is not None else getattr(data, "classes", None)
        self.classes = None if known is None else tuple(str(label) for label in known)

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def _labels(self) -> Tensor:
        targets = getattr(self.data, "targets", None)
        if targets is None or len(targets) != len(self) or getattr(self.data, "target_transform", None) is not None:
            targets = [self._item(i)[1] for i in range(len(self))]
        return torch.from_numpy(self._checked(targets, len(self)))

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [len]."""
        return self._labels

    @cached_property
    def _label_sum(self) -> int | None:
        return None                     # the labels may cost a pass over all images

    def _checked(self, labels: Any, count: int) -> NDArray[np.int64]:
        array = np.asarray(labels)
        limit = None if self.classes is None else len(self.classes)
        return check_labels(array, count, limit, self.name).astype(np.int64)

    def _item(self, index: int) -> tuple[Any, Any]:
        item = self.data[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{self.name}, item {index}: expected (image, label), found {type(item).__name__}")
        image, label = item
        if isinstance(label, Tensor):
            label = label.item()
        return image, label

    def _image(self, index: int, image: Any) -> Tensor:
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != 3:
            found = f"tensor {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise DataError(f"{self.name}, item {index}: expected an image as a tensor [3, H, W], found {found}")
        if image.dtype == torch.uint8:
            return image.float() / 255
        x = image.float()
        if not bool(((x >= 0) & (x <= 1)).all()):
            raise DataError(f"{self.name}, item {index}: images must lie in [0, 1], found {float(x.min()):g} to"
                            f" {float(x.max()):g}; put normalisation in the model, not in the dataset")
        return x

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Reads the items one after the other."""
        items = [(int(i), *self._item(int(i))) for i in indices]
        images = [self._image(i, image) for i, image, _ in items]
        for (i, _, _), image in zip(items, images, strict=True):
            if image.shape != images[0].shape:
                shapes = f"{list(image.shape)} where others are {list(images[0].shape)}"
                raise DataError(f"{self.name}, item {i}: is {shapes}")
        y = self._checked([label for _, _, label in items] or np.empty(0, np.int64), len(items))
        return torch.stack(images) if images else torch.empty(0, 3, 0, 0), torch.from_numpy(y)


def from_torch(
    data: torch_data.Dataset[Any], *, name: str | None = None, classes: Sequence[str] | None = None
) -> TorchDataset:
    """Any map-style torch dataset of (image, label) as a petal dataset; see `TorchDataset`."""
    return TorchDataset(data, name=name, classes=classes)


def digits(split: str = "test") -> ArrayDataset:
    """scikit-learn's handwritten digits as 32x32 RGB in [0, 1]: real images that are there offline.

    A fixed shuffle splits the 1,797 images into 1,000 for training and 797 for testing.

    >>> digits("train"), digits("test")
    (<ArrayDataset digits-train: 1000 images>, <ArrayDataset digits-test: 797 images>)
    """
    if split not in ("train", "test"):
        raise DataError(f"the splits of the digits are 'train' and 'test', not {split!r}")
    from sklearn.datasets import load_digits  # slow to import, and only this function needs it

    bunch = load_digits()
    shuffled = np.random.Generator(np.random.PCG64(1797)).permutation(len(bunch.target))
    chosen = shuffled[:1000] if split == "train" else shuffled[1000:]
    small = torch.from_numpy(bunch.images[chosen]).float().div_(16).unsqueeze(1)
    images = F.interpolate(small, size=32, mode="bilinear", align_corners=False).clamp_(0, 1).expand(-1, 3, -1, -1)
    return from_arrays(images.contiguous(), bunch.target[chosen].astype(np.int64), name=f"digits-{split}",
                       classes=[str(digit) for digit in range(10)])
