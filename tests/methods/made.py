"""Small adapters of every method, on the plain code or on the engine, and what the tests ask of them."""

import torch
from torch import Tensor

import petal
from networks import images, needed, network
from petal.engine import Policy

ENGINES = ("eager", "auto")
ADAPTING = ("pseudo-label", "tent", "cotta", "petal")


def make(kind: str, engine: str = "eager", net: torch.nn.Module | None = None, **options: object) -> petal.Adapter:
    """An adapter around a tiny network; teachers see views on every batch and restore some weights after it."""
    model = network() if net is None else net
    teacher = {"views": 2, "confidence": 2.0} | options
    if kind == "petal":
        q = petal.DiagonalGaussian.isotropic(model, std=0.05)
        adapter: petal.Adapter = petal.Petal(model, q, **({"restore": petal.Fisher(0.1)} | teacher))
    elif kind == "cotta":
        adapter = petal.CoTTA(model, **({"restore": petal.Stochastic(0.1)} | teacher))
    else:
        adapter = petal.METHODS[kind](model, *needed(kind, model), **options)
    return petal.accelerate(adapter, engine, policy=Policy())


def run(adapter: petal.Adapter, *seeds: int) -> list[Tensor]:
    return [adapter(images(seed=seed)) for seed in seeds]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
