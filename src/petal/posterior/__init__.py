"""The source posterior q(θ): where PETAL starts, what holds it, and what its weights may be put back to.

A posterior is data, not a module: tensors by parameter name, made once and never changed.

    gaussian    `Posterior`, what PETAL asks of one; `DiagonalGaussian` (SWAG-diagonal, Laplace)
    lowrank     `LowRankGaussian`: the directions in which weights moved together besides (SWAG)
    files       one safetensors file each
    confidence  how sure the source is of its own images
"""

import os

from petal.posterior.confidence import source_confidence
from petal.posterior.files import format_of
from petal.posterior.gaussian import DiagonalGaussian, Gaussian, Posterior
from petal.posterior.lowrank import LowRankGaussian


def load_posterior(path: str | os.PathLike[str]) -> DiagonalGaussian | LowRankGaussian:
    """Read any posterior that a `save` wrote."""
    return LowRankGaussian.load(path) if format_of(path) == LowRankGaussian.form else DiagonalGaussian.load(path)


__all__ = ["DiagonalGaussian", "Gaussian", "LowRankGaussian", "Posterior", "load_posterior", "source_confidence"]
