"""Which weights are restored to the source after a step. A restore makes masks; the method applies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petal.errors import ConfigError
from petal.functional import quantile_


class Restore(Protocol):
    """Anything that says which weights to put back, given the parameters with their gradients of this step."""

    def masks(self, parameters: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """One boolean tensor per parameter: True where the source's weight is restored."""
        ...


@dataclass(frozen=True)
class Fisher:
    """Put back the weights whose Fisher information on this batch is below its global `quantile` (Alg. 2, l. 13-14).

    One threshold holds for all parameters together, and the comparison is strict: Fisher(0) restores nothing, and
    neither does any quantile at which the information is exactly zero.
    """

    quantile: float = 0.03
    elementwise = True          # one flat tensor of all weights will do for the list

    def __post_init__(self) -> None:
        _check_share("the quantile of Fisher", self.quantile)

    def masks(self, parameters: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """True where grad² < γ. The gradients are read before the optimizer may change them."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gamma = quantile_(torch.cat([g.reshape(-1) for g in grads]).square_(), self.quantile)
        return [g.square() < gamma for g in grads]


@dataclass(frozen=True)
class Stochastic:
    """Put back every weight with the same `probability`, drawn anew each step (CoTTA; the paper's S-Res)."""

    probability: float = 0.01
    elementwise = True

    def __post_init__(self) -> None:
        _check_share("the probability of Stochastic", self.probability)

    def masks(self, parameters: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        """True with the given probability; at 0 nothing is drawn."""
        if self.probability == 0:
            return [torch.zeros_like(p, dtype=torch.bool) for p in parameters]
        return [
            torch.rand(p.shape, device=p.device, generator=generator) < self.probability for p in parameters
        ]


def _check_share(what: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{what} lies in [0, 1], got {value}")
