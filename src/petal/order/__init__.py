"""The order of a stream as evidence: a prior for the next label, from the answers so far."""

from petal.order.keys import Key, Keys
from petal.order.prior import TemporalPrior

__all__ = ["Key", "Keys", "TemporalPrior"]
