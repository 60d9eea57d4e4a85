"""PETAL: probabilistic lifelong test-time adaptation with a self-training prior (Brahma and Rai, 2023)."""

import torch
from torch import nn

from petal.augment import Augment
from petal.errors import ConfigError
from petal.methods.base import Executor, OptimizerFactory, Rates
from petal.methods.card import Card
from petal.methods.descent import Gaussian, Penalty
from petal.methods.inputs import check_number
from petal.methods.mean_teacher import MeanTeacher
from petal.posterior import DiagonalGaussian
from petal.restore import Fisher, Restore


class Petal(MeanTeacher):
    """Algorithm 2 of the paper; the defaults are the paper's for CIFAR-10.

    Student, teacher and source start at the posterior's mean (and its buffers, if any). The released code's behaviour is
    gate="batch", average="logits"; the paper's is the default.

    While the gate has never opened, teacher and student are the same network: the gradient of the consistency loss is
    then rounding noise, of which Adam makes full steps.
    """

    card = Card(
        title="PETAL", year=2023, adapts="all weights", needs=("posterior",),
        paper="Brahma and Rai, A probabilistic framework for lifelong test-time adaptation, CVPR 2023",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        posterior: DiagonalGaussian | None = None,
        lr: Rates = 1e-3,
        ema: float = 0.999,
        views: int = 32,
        confidence: float = 0.92,
        prior_weight: float = 1e-9,
        restore: Restore | None = Fisher(0.03),
        augment: Augment | None = None,
        gate: str = "sample",
        average: str = "probs",
        loss: str = "cross-entropy",
        learn: str = "plain",
        target: str = "teacher",
        answer: str = "teacher",
        warmup: float | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        check_number("prior_weight", prior_weight, low=0)
        if posterior is None and prior_weight:
            raise ConfigError("the prior needs a posterior (petal.fit_swag, DiagonalGaussian): give one, or prior_weight=0")
        if posterior is not None:
            if not isinstance(posterior, DiagonalGaussian):
                raise ConfigError(
                    f"Petal takes a posterior (petal.fit_swag, petal.DiagonalGaussian), got {type(posterior).__name__}"
                )
            posterior.check(model)
            like = next(model.parameters())
            posterior = posterior.to(like.device, like.dtype)
        super().__init__(
            model, lr=lr, ema=ema, views=views, confidence=confidence, restore=restore, augment=augment, gate=gate,
            average=average, loss=loss, learn=learn, target=target, answer=answer, warmup=warmup, optimizer=optimizer,
            steps=steps, episodic=episodic, seed=seed, start=None if posterior is None else posterior.mean,
            buffers=None if posterior is None else posterior.buffers,
        )  # fmt: skip
        self.posterior = posterior
        self.prior_weight = prior_weight

    def penalties(self) -> list[Penalty]:
        """-α log q(θ) (Alg. 2, l. 10); the source network is at the mean."""
        q = self.posterior
        return [Gaussian(self.source, q.var, q.damping, self.prior_weight)] if q is not None and self.prior_weight else []

    def execute_with(self, executor: Executor | None) -> None:
        """The posterior goes along to the tensors that an executor works on: none is kept twice."""
        super().execute_with(executor)
        if executor is not None and self.posterior is not None:
            mean = {name: parameter.detach() for name, parameter in self.source.named_parameters()}
            self.posterior = self.posterior.moved(mean, executor.together(self.posterior.var))

    def describe(self) -> dict[str, str]:
        """What it does and with which settings."""
        prior = f"prior of weight {self.prior_weight:g}" if self.prior_weight else "no prior"
        start = "none: starts at the network" if self.posterior is None else "starts at its mean"
        return super().describe() | {"posterior": f"{start}; {prior}"}
