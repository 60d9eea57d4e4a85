"""The scores of tables, how they are printed, and their means over runs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Metric:
    """How a score is shown: its name, and the factor and digits of printed tables."""

    name: str
    title: str
    scale: float
    digits: int

    def text(self, value: float, sign: bool = False) -> str:
        """A score as printed.

        >>> METRICS["error"].text(0.16288), METRICS["nll"].text(0.5, sign=True), METRICS["nll"].text(math.nan)
        ('16.29', '+0.5000', 'nan')
        """
        return format(value * self.scale, f"{'+' if sign else ''}.{self.digits}f")


METRICS: dict[str, Metric] = {
    "error": Metric("error", "Error (%)", 100.0, 2),
    "nll": Metric("nll", "NLL", 1.0, 4),
    "brier": Metric("brier", "Brier", 1.0, 4),
    "ece": Metric("ece", "ECE", 1.0, 4),
}


@dataclass(frozen=True)
class Stat:
    """The mean over `n` runs and their sample standard deviation (None for a single run)."""

    mean: float
    std: float | None
    n: int


def stat(values: Iterable[float]) -> Stat:
    """Mean and sample standard deviation.

    >>> stat([1.0, 3.0]), stat([2.0])
    (Stat(mean=2.0, std=1.4142135623730951, n=2), Stat(mean=2.0, std=None, n=1))
    """
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return Stat(math.nan, None, 0)
    return Stat(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))
