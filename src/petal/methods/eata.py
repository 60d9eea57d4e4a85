"""EATA: ETA that holds what the source needs (Niu et al., 2022)."""

from collections.abc import Sequence

import torch
from torch import nn

from petal.errors import StatisticsError
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.descent import Penalty, Quadratic
from petal.methods.eta import ETA
from petal.methods.inputs import check_number
from petal.statistics import SourceStatistics


class EATA(ETA):
    """Adds `fisher_weight` · Σ F (θ - θ_0)² to the objective (eq. 8), F from `petal.collect_statistics(..., ["fisher"])`.

    The defaults are those for CIFAR-10; ImageNet has fisher_weight=2000 and similarity=0.05. Where no sample counts there is
    no step, of the regulariser either.
    """

    card = Card(
        title="EATA", year=2022, adapts=AFFINE, needs=("fisher",), random=False,
        paper="Niu et al., Efficient test-time model adaptation without forgetting, ICML 2022",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics,
        lr: float = 1e-3,
        margin: float = 0.4,
        similarity: float = 0.4,
        fisher_weight: float = 1.0,
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
        check_number("fisher_weight", fisher_weight, low=0)
        if not isinstance(statistics, SourceStatistics):
            raise StatisticsError(f"EATA takes petal.SourceStatistics with fisher, got {type(statistics).__name__}")
        statistics.check(model, "fisher")
        missing = self.adapted.keys() - statistics.fisher.keys()
        if missing:
            raise StatisticsError(f"the statistics have no Fisher information of {', '.join(sorted(missing)[:10])}")
        with torch.inference_mode(False):
            self.fisher = {name: statistics.fisher[name].to(p, copy=True) for name, p in self.adapted.items()}
        self.fisher_weight = fisher_weight

    def penalties(self) -> list[Penalty]:
        """β R(θ, θ_0) (eq. 8)."""
        return [Quadratic(self.fisher, self.start, self.fisher_weight)] if self.fisher_weight else []
