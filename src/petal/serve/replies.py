"""What a batch of requests gets: one set of logits, each request its part of it."""

import time
from dataclasses import dataclass, field

from torch import Tensor

from petal import functional as F
from petal.errors import PetalError
from petal.serve.queue import Answer, Item


class Unanswered(PetalError):
    """The network gave no usable answer."""


@dataclass(frozen=True)
class Shown:
    """The answer to a batch, on the CPU: [n, C] twice, [n] the rest."""

    logits: Tensor
    probabilities: Tensor
    confidence: Tensor
    label: Tensor
    entropy: Tensor
    finite: Tensor
    version: str
    adapted: bool

    @classmethod
    def of(cls, logits: Tensor, version: str, adapted: bool) -> "Shown":
        """All that is said of an image, from its logits."""
        logits = logits.float().cpu()
        probabilities = logits.softmax(1)
        confidence, label = probabilities.max(1)
        return cls(
            logits, probabilities, confidence, label, F.entropy(logits), logits.isfinite().all(1), version, adapted
        )


@dataclass
class Reply:
    """Requests that are answered together, and their samples [n, ...]; `shown` once they are answered."""

    items: list[Item]
    x: Tensor
    began: float
    shown: Shown | None = field(default=None)

    @property
    def seconds(self) -> float:
        """Since work on it began."""
        return time.monotonic() - self.began

    def send(self, shown: Shown) -> None:
        """Give each request its part, or an error if that is not finite."""
        start = 0
        for item in self.items:
            part = slice(start, start := start + len(item.x))
            if not bool(shown.finite[part].all()):
                item.future.set_exception(Unanswered("the network's answer is not finite"))
                continue
            logits, probabilities = shown.logits[part].numpy(), shown.probabilities[part].numpy()
            label, entropy = shown.label[part].numpy(), shown.entropy[part].numpy()
            item.future.set_result(Answer(logits, probabilities, label, entropy, shown.version, shown.adapted))
