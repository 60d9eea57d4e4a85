"""What a guard does to an adapter: snapshots and the way back to them, a pull toward the source, and cool-downs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from petal.methods import Adapter

POLICIES = ("warn", "rollback", "soften", "reset", "freeze")
FORGET = 100                                # cool-downs after which an alarm is forgotten
DOUBLINGS = 8                               # a cool-down is never longer than 2^8 of the first


@dataclass(frozen=True)
class Alarm:
    """What was seen and done: after which batch, by which signal, its value and limit, and the action taken."""

    step: int
    signal: str
    value: float
    limit: float
    action: str


class Snapshots:
    """Copies of what a guard keeps: the last good ones, and a candidate, promoted if every look after it is healthy."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.good: dict[str, Tensor] | None = None
        self.candidate: dict[str, Tensor] | None = None
        self.kept = 0                       # samples seen when the candidate was taken; frozen samples are left out
        self.well = True                    # every look since then was healthy

    def weights(self) -> dict[str, Tensor]:
        """The tensors themselves that adapt, by their name in the state."""
        return self.adapter.weights()

    def copy(self) -> dict[str, Tensor]:
        """A copy of what is kept, as it is now."""
        return _copied(self.adapter.kept())

    def update(self, healthy: bool, seen: int, window: int) -> None:
        """After a look: promote the candidate and take a new one every `window` samples, as long as looks are healthy."""
        if not healthy:
            self.well = False
        elif seen - self.kept >= window or not self.well:
            if self.well and self.candidate is not None:
                self.good = self.candidate
            self.candidate, self.kept, self.well = self.copy(), seen, True

    def pull(self, origin: Mapping[str, Tensor], share: float, fresh: bool) -> None:
        """Weight ensembling with the source, in student and teacher: θ <- (1 - share) θ + share θ_0."""
        weights = _copied(self.weights())
        for key, value in weights.items():
            start = origin.get(key.partition(".")[2])
            if start is not None:
                value.lerp_(start, share)
        self.adapter.load_weights(weights, fresh)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.inference_mode(False):
        return {key: value.detach().clone() for key, value in tensors.items()}


class CoolDown:
    """When learning is off. It stays off twice as long after every alarm that follows soon, up to 2^8 times."""

    def __init__(self) -> None:
        self.thaw = 0                       # learning is off until so many samples were seen; -1: until it is turned on
        self.strikes = 0                    # alarms that are not forgotten
        self.last = 0                       # samples seen at the last alarm

    def strike(self, seen: int, length: int) -> int:
        """Count an alarm. Returns how many came before; they are forgotten after more than 100 times `length` samples."""
        before = 0 if seen - self.last > FORGET * length else self.strikes
        self.strikes, self.last = before + 1, seen
        return before

    def start(self, seen: int, length: int, before: int) -> None:
        """Turn learning off for `length` samples, doubled for each of the alarms `before`."""
        self.thaw = seen + length * 2 ** min(before, DOUBLINGS)
