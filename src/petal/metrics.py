"""Error, NLL, Brier score and calibration error as torchmetrics metrics of logits and labels, and `SCORES` of samples.

torchmetrics has no Brier score and no NLL of a prediction, and its calibration error keeps every confidence it ever saw.
These keep sums only, so they can watch a stream for as long as it lasts; the base class brings reset, device moves and
synchronisation between processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from petal import functional as F

#: from logits [N, C] and labels [N] to the score of each sample [N]; that of a batch or a stream is the mean
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"error": F.wrong, "nll": F.nll, "brier": F.brier}
BINS = 15


class MeanOverSamples(Metric):
    """Mean over all samples seen of a score of each sample, summed in float64."""

    full_state_update = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.score = score
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits [N, C] and labels [N]."""
        self.total += self.score(logits, labels).double().sum()
        self.count += labels.numel()

    def compute(self) -> Tensor:
        """The mean over everything added; NaN before anything was."""
        return self.total / self.count


class Error(MeanOverSamples):
    """Share of wrong labels.

    >>> metric = Error()
    >>> metric(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(SCORES["error"], **kwargs)


class NLL(MeanOverSamples):
    """Mean negative log-likelihood of the true label."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(SCORES["nll"], **kwargs)


class Brier(MeanOverSamples):
    """Brier score: summed over classes, mean over samples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(SCORES["brier"], **kwargs)


class CalibrationError(Metric):
    """Expected calibration error over `bins` equal bins of confidence, from counts alone.

    >>> metric = CalibrationError()
    >>> metric(torch.tensor([[100.0, 0.0], [100.0, 0.0]]), torch.tensor([0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    counts: Tensor

    def __init__(self, bins: int = BINS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if bins < 1:
            raise ValueError(f"calibration needs at least one bin, got {bins}")
        self.bins = bins
        self.add_state("counts", torch.zeros(3, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits [N, C] and labels [N]."""
        self.counts += F.calibration_counts(logits, labels, self.bins)

    def compute(self) -> Tensor:
        """The error over everything added."""
        return F.calibration_error(self.counts)
