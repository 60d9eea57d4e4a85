"""A Gaussian whose weights also vary together, along a few directions (SWAG, Maddox et al., 2019)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from petal.errors import PosteriorError
from petal.posterior.gaussian import Gaussian, Named, noise_like


@dataclass(frozen=True, eq=False)
class LowRankGaussian(Gaussian):
    """q(θ) = N(mean, diag(var + damping) + Σ f_k f_kᵀ), the f_k being the rows of `factors` [K, ...] by parameter name.

    SWAG (eq. 1 of Maddox et al.) has half the variance of the snapshots as `var`, and their deviations from the mean,
    divided by sqrt(2 (K - 1)), as factors: `petal.fit_swag(..., rank=K)`.

    >>> one = torch.ones(2)
    >>> q = LowRankGaussian({"w": 0 * one}, {"w": one}, 0.0, factors={"w": one[None]})      # covariance [[2, 1], [1, 2]]
    >>> q.score({"w": torch.tensor([3.0, 0.0])})["w"]
    tensor([-2.,  1.])
    """

    form = "petal-posterior-lowrank-1"
    groups = ("mean", "var", "factors")

    factors: Named = field(default_factory=dict)
    _lower: Tensor = field(init=False, repr=False)          # Cholesky factor of I + Fᵀ D⁻¹ F

    def __post_init__(self) -> None:
        wrong = [n for n, m in self.mean.items() if n not in self.factors or self.factors[n].shape[1:] != m.shape]
        ranks = {f.shape[:1] for f in self.factors.values()}
        if wrong or self.factors.keys() != self.mean.keys() or len(ranks) != 1 or ranks == {torch.Size([0])}:
            raise PosteriorError(
                "factors are K >= 1 rows of the shape of each parameter, the same K for all; they do not fit "
                f"{', '.join(map(repr, wrong)) or 'each other or the mean'}"
            )
        super().__post_init__()
        (rank,) = ranks.pop()
        inner = torch.eye(rank, dtype=torch.float64, device=next(iter(self.mean.values())).device)
        for name, factor in self.factors.items():
            rows = factor.flatten(1).double()
            inner += (rows / (self.var[name] + self.damping).flatten()) @ rows.T
        object.__setattr__(self, "_lower", torch.linalg.cholesky(inner))

    def variance(self) -> dict[str, Tensor]:
        """The variance of every weight by itself, without the damping."""
        return {n: v + self.factors[n].square().sum(0) for n, v in self.var.items()}

    def score(self, parameters: Named) -> dict[str, Tensor]:
        """The gradient of log q at these parameters, by Woodbury's identity: D⁻¹ F (I + Fᵀ D⁻¹ F)⁻¹ Fᵀ D⁻¹ δ - D⁻¹ δ."""
        scaled = {n: (p - self.mean[n]) / (self.var[n] + self.damping) for n, p in parameters.items()}      # D⁻¹ δ
        along = sum(self.factors[n].flatten(1).double() @ s.flatten().double() for n, s in scaled.items())
        assert isinstance(along, Tensor)
        lower = self._lower.to(along.device)
        weights = torch.cholesky_solve(along[:, None], lower)[:, 0]
        return {
            n: torch.tensordot(weights.to(s.dtype), self.factors[n], 1) / (self.var[n] + self.damping) - s
            for n, s in scaled.items()
        }

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters drawn from it, damping included."""
        first = next(iter(self.mean.values()))
        weights = noise_like(first.new_empty(len(self._lower)), generator)
        out = {n: m + torch.tensordot(weights, self.factors[n], 1) for n, m in self.mean.items()}
        return {n: p + (self.var[n] + self.damping).sqrt() * noise_like(p, generator) for n, p in out.items()}
