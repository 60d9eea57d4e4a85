"""Photographs as a camera that moves over them sees them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from petal.data.dataset import CorruptedDataset, Dataset, check_whole
from petal.errors import DataError


class Frames(Dataset):
    """Each photograph of `data` as `count` frames: a window that moves along a straight line, at an even speed.

    The window has the share `share` of the photograph's height and width, and becomes `size`, by default the photograph's.
    Where the line begins and ends is drawn for each photograph from `seed`. The frames of a photograph follow one another
    and have its label, so in this order labels come in runs of `count`, of images that are much alike.
    """

    def __init__(
        self, data: Dataset, count: int = 20, share: float = 0.75, size: tuple[int, int] | None = None, seed: int = 0
    ) -> None:
        if isinstance(data, CorruptedDataset):
            raise DataError(f"{data.name} has its images already corrupted; frames are taken of clean ones")
        if not 0 < share <= 1:
            raise DataError(f"share must be above 0 and at most 1; got {share}")
        self.data, self.count, self.share, self.size = data, check_whole("count", count, 1), share, size
        self.seed = check_whole("seed", seed, 0)
        self.name, self.classes = f"{data.name}-frames-{count}", data.classes

    def __len__(self) -> int:
        return len(self.data) * self.count

    @property
    def labels(self) -> Tensor:
        """Those of the photographs, int64 [len]."""
        return self.data.labels.repeat_interleave(self.count)

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Frames and labels; every photograph is read once."""
        numbers, which = np.unique(indices // self.count, return_inverse=True)
        photographs, labels = self.data.batch(numbers)
        frames = [
            self._frame(photographs[place], int(numbers[place]), int(index) % self.count)
            for place, index in zip(which, indices, strict=True)
        ]
        return torch.stack(frames), labels[torch.from_numpy(which)]

    def fingerprint(self) -> dict[str, Any]:
        """That of the photographs, and how frames are taken."""
        settings = {"count": self.count, "share": self.share, "size": self.size, "seed": self.seed}
        return {"name": self.name, "images": len(self), "frames": settings, "of": self.data.fingerprint()}

    def _frame(self, photograph: Tensor, number: int, frame: int) -> Tensor:
        height, width = photograph.shape[1:]
        window = max(round(height * self.share), 1), max(round(width * self.share), 1)
        ends = np.random.default_rng([self.seed, number]).random((2, 2)) * (height - window[0], width - window[1])
        top, left = np.rint(ends[0] + (ends[1] - ends[0]) * frame / max(self.count - 1, 1)).astype(int)
        cut = photograph[None, :, top : top + window[0], left : left + window[1]]
        size = self.size or (height, width)
        return F.interpolate(cut, size, mode="bilinear", antialias=True, align_corners=False)[0].clamp(0, 1)
