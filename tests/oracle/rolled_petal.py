"""PETAL with the images of each batch in another order: the same method in exact arithmetic, summed up otherwise.

    petal run cifar10 --plugin tests/oracle/rolled_petal.py -m petal -m petal-rolled-1 -m petal-rolled-50 --engine eager ...

Means over the batch do not depend on the order of its images, so that what differs between these rows is what rounding
makes of a run. (The views' noise falls on other images: as much as another seed changes.)
"""

from typing import Any

from torch import Tensor, nn

import petal


class RolledPetal(petal.Petal):
    shift = 1

    def __init__(
        self, model: nn.Module, posterior: petal.DiagonalGaussian, views: int = 32, confidence: float = 0.92,
        gate: str = "batch", average: str = "logits", seed: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            model, posterior, views=views, confidence=confidence, gate=gate, average=average, seed=seed, **options
        )  # fmt: skip

    def step(self, x: Tensor) -> Tensor:
        return super().step(x.roll(self.shift, 0)).roll(-self.shift, 0)


class RolledBy50(RolledPetal):
    shift = 50


class RolledBy100(RolledPetal):
    shift = 100


petal.METHODS["petal-rolled-1"] = RolledPetal
petal.METHODS["petal-rolled-50"] = RolledBy50
petal.METHODS["petal-rolled-100"] = RolledBy100
