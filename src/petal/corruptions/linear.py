"""Separable linear maps of images, as one matrix for the rows and one for the columns.

A matrix carries the border rule in itself, so that blurs of any width work on images of any size. Products are taken in
float64 and rounded to float32 once: what an image becomes then does not depend on how many images share the product, and
reduced-precision matrix units are never used.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["apply", "blur", "gaussian_matrix"]

Border = Literal["nearest", "reflect"]


def apply(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns.T for every plane of x [..., H, W]; float64 in, float64 out."""
    *lead, height, width = x.shape
    across = x.reshape(-1, width) @ columns.mT
    across = across.view(-1, height, columns.shape[0]).mT.reshape(-1, height)
    down = across @ rows.mT
    return down.view(-1, columns.shape[0], rows.shape[0]).mT.reshape(*lead, rows.shape[0], columns.shape[0])


def blur(x: Tensor, sigma: float, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """Gaussian blur of the planes of x [..., H, W], the kernel cut at truncate * sigma and normalised."""
    if int(truncate * sigma + 0.5) == 0:
        return x
    rows = gaussian_matrix(x.shape[-2], sigma, truncate, border, x.device)
    columns = gaussian_matrix(x.shape[-1], sigma, truncate, border, x.device)
    return apply(x.double(), rows, columns).to(x.dtype)


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float, border: Border, device: torch.device) -> Tensor:
    """float64 [size, size]: the blur of a line, with the pixels beyond its ends folded in.

    "nearest" repeats the last pixel; "reflect" mirrors with the last pixel doubled (d c b a | a b c d).
    """
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    source = np.arange(size)[:, None] + offsets
    if border == "nearest":
        source = source.clip(0, size - 1)
    else:
        source = source % (2 * size)
        source = np.where(source < size, source, 2 * size - 1 - source)
    matrix: NDArray[np.float64] = np.zeros((size, size))
    np.add.at(matrix, (np.arange(size)[:, None], source), np.broadcast_to(weights, source.shape))
    return torch.from_numpy(matrix).to(device)
