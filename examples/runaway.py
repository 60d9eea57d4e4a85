"""A forced collapse, to see the guard at work: PETAL whose learning rate is fifty times too large from some batch on.

    petal run digits --plugin examples/runaway.py -m runaway -m runaway+guard --set runaway.gate=batch
"""

from torch import Tensor, nn

import petal


class Runaway(petal.Petal):
    """PETAL until `after` batches have come, then with its learning rate times `times`."""

    def __init__(
        self, model: nn.Module, posterior: petal.DiagonalGaussian, after: int = 100, times: float = 50.0, views: int = 32,
        gate: str = "sample", seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model, posterior, views=views, gate=gate, seed=seed)
        self.begins, self.times, self.batches = after, times, 0

    def step(self, x: Tensor) -> Tensor:
        """Algorithm 2, too fast from some batch on."""
        if self.batches == self.begins:
            self.lr *= self.times                                    # a fresh optimizer after a rollback has it too
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
        self.batches += 1
        return super().step(x)


petal.METHODS["runaway"] = Runaway
