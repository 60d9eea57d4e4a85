"""RDumb: ETA that starts again every so often (Press et al., 2023)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.eta import ETA
from petal.methods.inputs import check_number
from petal.methods.resets import Every, restart


class RDumb(ETA):
    """ETA whose weights, optimizer and mean prediction go back to the start after every so many updates.

    A batch of which no sample counts is an update too.
    """

    card = Card(
        title="RDumb", year=2023, adapts=AFFINE, random=False,
        paper="Press et al., RDumb: a simple approach that questions our progress in continual TTA, NeurIPS 2023",
    )  # fmt: skip
    updates: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        margin: float = 0.4,
        similarity: float = 0.4,
        every: int = 1000,
        momentum: float = 0.9,
        loss: str = "entropy",
        *,
        frozen: Sequence[str] = (),
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(
            model, lr, margin, similarity, momentum, loss,
            frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed,
        )  # fmt: skip
        check_number("every", every, low=1, whole=True)
        self.every = Every(every)
        self.register_state("updates", torch.zeros((), dtype=torch.int64, device=self.device))

    def step(self, x: Tensor) -> Tensor:
        """A step of ETA, then perhaps the reset."""
        logits = super().step(x)
        self.updates, due = self.every.due(self.updates, logits.detach())
        restart(self, self.start, due)
        self.mean = None if self.mean is None else self.mean.masked_fill(due, 0)
        return logits
