"""Learning rates that follow from the shape of a tensor, and the optimizer that has them by default."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from petal.methods.inputs import check_number
from petal.posterior import Posterior


@dataclass(frozen=True)
class FanIn:
    """A rate for every tensor, given as `lr` to any method: min(most, scale / fan-in), and `vectors` for vectors.

    The fan-in is how many weights make one output. Adam moves each weight by about its rate, and an output by about rate
    times fan-in: so the rates that suit one width suit another (Yang et al., Tensor Programs V, 2021). Tensors with one row,
    or with one number a row, are vectors: biases, scale and shift of norms, class tokens.

    >>> FanIn().of(torch.empty(64, 32, 3, 3)), FanIn().of(torch.empty(640, 640, 3, 3)), FanIn().of(torch.empty(64))
    (0.001, 0.00019965277777777776, 0.0003)
    """

    scale: float = 1.15
    most: float = 1e-3
    vectors: float = 3e-4

    def __post_init__(self) -> None:
        for name in ("scale", "most", "vectors"):
            check_number(f"{name} of FanIn", getattr(self, name), low=0)

    def of(self, parameter: torch.Tensor) -> float:
        """The rate of one tensor."""
        rows = parameter.shape[0] if parameter.dim() else 1
        fan_in = parameter.numel() // max(rows, 1)
        return self.vectors if rows <= 1 or fan_in <= 1 else min(self.most, self.scale / fan_in)

    def rates(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The rates of parameters by their names."""
        return {name: self.of(parameter) for name, parameter in parameters.items()}

    def __str__(self) -> str:
        return f"min({self.most:g}, {self.scale:g} / fan-in), vectors {self.vectors:g}"


@dataclass(frozen=True)
class PosteriorRates:
    """A rate for every tensor, given as `lr` to `Petal`: a `share` of the posterior's deviation in it, `most` at most.

    The deviation is the root of the tensor's mean variance, without the damping: weights that the source's data leaves free
    move faster. It was made to be compared with `FanIn` (docs/guides/flagship.md).
    """

    share: float = 0.1
    most: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("share", "most"):
            check_number(f"{name} of PosteriorRates", getattr(self, name), low=0)

    def rates(self, posterior: Posterior) -> dict[str, float]:
        """The rates of parameters by their names."""
        variance = posterior.variance()
        return {name: min(self.most, self.share * float(v.double().mean()) ** 0.5) for name, v in variance.items()}


def adam(parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer: Adam with betas 0.9 and 0.999. The fused form needs no parameter-sized scratch."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)
