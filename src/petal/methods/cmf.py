"""CMF: ROID with weights filtered over time by a Kalman filter (Lee and Chang, 2024)."""

import torch
from torch import Tensor, nn

from petal.augment import Augment
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, NO_BATCH_NORM, Card
from petal.methods.descent import After, Kalman
from petal.methods.inputs import check_number
from petal.methods.mean_teacher import network_with
from petal.methods.roid import ROID

TRAINED = 38_400    # parameters of the network that the noise is given for


class CMF(ROID):
    """ROID's losses and answers; a hidden state of the weights follows the source and them, and they follow it.

    After every step `share` of the weights is the hidden state's, and before it `forget` of the hidden state the source's.
    The filter's `noise` is that of 38,400 trained parameters, and in proportion for others, as in the released code,
    where a gain below 1e-4 counts as none. That code forgets to reset the filter's variance; here it starts anew. Its other
    form of the filter ("op") does what this one does, since the two states that it chooses from are one object. All other
    arguments are ROID's.
    """

    card = Card(
        title="CMF", year=2024, adapts=AFFINE, correlated_labels=NO_BATCH_NORM,
        paper="Lee and Chang, Continual momentum filtering on parameter space for online test-time adaptation, ICLR 2024",
    )  # fmt: skip

    hidden: nn.Module
    variance: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        share: float = 0.01,
        forget: float = 0.01,
        noise: float = 0.005,
        temperature: float = 1 / 3,
        momentum: float = 0.9,
        weighting: bool = True,
        consistency: float = 1.0,
        augment: Augment | None = None,
        augmented: str = "kept",
        answer: str = "own",
        batch_size: int | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(
            model, lr, share, temperature, momentum, weighting, consistency, augment, augmented, answer, batch_size,
            optimizer=optimizer, steps=steps, episodic=episodic, seed=seed,
        )  # fmt: skip
        check_number("forget", forget, low=0, high=1)
        check_number("noise", noise, low=0)
        self.forget = forget
        self.noise = noise * sum(value.numel() for value in self.adapted.values()) / TRAINED
        self.register_network("hidden", network_with(self.model, None))
        self.register_state("variance", torch.zeros((), dtype=torch.float64, device=self.device))

    def after(self) -> list[After]:
        """The filter, and the weights toward what it holds."""
        return [Kalman(self.hidden, self.start, self.variance, self.noise, 1 - self.forget, self.share)]
