"""Which samples of a batch to learn from, as masks: shapes stay what they are, and nothing waits for the device.

A filter is a mask [N]; filters are joined by `&`, a loss is averaged by `masked_mean`, and `descend(..., when=mask.any())`
makes no step where nothing is left.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.errors import ConfigError


def reliable(uncertainty: Tensor, margin: float, classes: int) -> Tensor:
    """True where the uncertainty of a sample is below the `margin`, a share of ln `classes` (EATA, eq. 3; SAR, eq. 2).

    What is not a number passes: a step on it is then skipped and counted.

    >>> reliable(torch.tensor([0.1, 1.0]), 0.4, 10)
    tensor([ True, False])
    """
    return ~(uncertainty.detach() >= margin * math.log(classes))


def masked_mean(values: Tensor, keep: Tensor) -> Tensor:
    """The mean of the values that are kept; zero, without a gradient, of none.

    >>> masked_mean(torch.tensor([1.0, 5.0]), torch.tensor([True, False])), masked_mean(torch.ones(2), torch.zeros(2).bool())
    (tensor(1.), tensor(0.))
    """
    return torch.where(keep, values, torch.zeros_like(values)).sum() / keep.sum().clamp(min=1)


@dataclass(frozen=True)
class Redundancy:
    """Leaves out samples whose prediction is like the mean prediction so far (EATA, eq. 5).

    The mean [C] is the state of the method that uses it: None or zeros as long as no sample has entered it.
    """

    similarity: float = 0.05    # cosines below it are unlike
    momentum: float = 0.9       # of the mean

    def __post_init__(self) -> None:
        if not (0 <= self.similarity <= 1 and 0 <= self.momentum <= 1):
            raise ConfigError(
                f"similarity and momentum of Redundancy lie in [0, 1], got {self.similarity} and {self.momentum}"
            )

    def unlike(self, probabilities: Tensor, mean: Tensor | None) -> Tensor:
        """True for the predictions [N, C] that are unlike the mean; for all while there is none."""
        if mean is None:
            return torch.ones(len(probabilities), dtype=torch.bool, device=probabilities.device)
        cosine = F.cosine_similarity(mean[None], probabilities, dim=1)
        return ~(cosine.abs() >= self.similarity) | ~mean.any()

    def follow(self, probabilities: Tensor, mean: Tensor | None, keep: Tensor) -> Tensor:
        """The mean after the samples that are kept: theirs at first, later momentum · mean + (1 - momentum) · theirs."""
        mean = torch.zeros_like(probabilities[0]) if mean is None else mean
        now = torch.where(keep[:, None], probabilities, 0.0).sum(0) / keep.sum().clamp(min=1)
        moved = torch.where(mean.any(), self.momentum * mean + (1 - self.momentum) * now, now)
        return torch.where(keep.any() & now.isfinite().all(), moved, mean)
