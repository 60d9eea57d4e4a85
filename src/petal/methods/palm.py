"""PALM: learning rates by layer, from gradients toward the uniform prediction (Maharana et al., 2025)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.augment import Augment, Views
from petal.errors import ConfigError
from petal.filters import masked_mean, reliable
from petal.functional import cross_entropy, entropy
from petal.methods.base import Adapter, OptimizerFactory, Rates
from petal.methods.card import Card
from petal.methods.contrast import ADAPTS, chosen
from petal.methods.descent import Scale
from petal.methods.inputs import check_choice, check_number
from petal.methods.resets import forget_steps

EPS = 1e-8


class PALM(Adapter):
    """Entropy of sure samples and consistency with a view, by a rate for each tensor.

    g is the gradient of the cross-entropy of softmax(logits / `temperature`) under ones for all classes. Tensors with
    |g|_1 <= `threshold` are selected; their sensitivity S = |θ g| is averaged over time (S' keeps the share `momentum`),
    and their rate is `lr` times the mean of |S - S'| / S'. Samples count if their entropy is below `margin` · ln C (in the
    released code 0.4 nats for all C), and the consistency is weighted by `consistency` · C. The defaults are for CIFAR-10.

    Where paper and released code differ, the code is followed: a tensor that is not selected now steps with the rate of when
    it last was; unselected="frozen" lets it rest, as in the paper. The optimizer begins anew with every batch, so that
    Adam's steps are of the size of the rate; fresh=False lets it go on. `adapts` is "conv", convolutions and normalisation
    layers, "norm", "weights" (what is called weight or bias) or "all". In the released code a batch without a sure sample
    has a loss, and from then on weights, that are not a number; here it is learned from by consistency alone.
    """

    card = Card(
        title="PALM", year=2025, adapts="convolutions and norm layers",
        paper="Maharana et al., PALM: pushing adaptive learning rate mechanisms for continual test-time adaptation, "
              "AAAI 2025",
    )  # fmt: skip

    sensitivity: Tensor
    shares: Tensor

    def __init__(
        self,
        model: nn.Module,
        lr: Rates = 5e-4,
        threshold: float = 1.0,
        temperature: float = 50.0,
        momentum: float = 0.5,
        margin: float = 0.4 / math.log(10),
        consistency: float = 0.01,
        augment: Augment | None = None,
        adapts: str = "conv",
        unselected: str = "last",
        fresh: bool = True,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        check_number("threshold", threshold, low=0)
        check_number("temperature", temperature, low=1e-6)
        check_number("momentum", momentum, low=0, high=1)
        check_number("margin", margin, low=0)
        check_number("consistency", consistency, low=0)
        check_choice("adapts", adapts, ADAPTS)
        check_choice("unselected", unselected, ("last", "frozen"))
        self.threshold, self.temperature, self.momentum = threshold, temperature, momentum
        self.margin, self.consistency, self.frozen, self.fresh = margin, consistency, unselected == "frozen", fresh
        self.augment = Views() if augment is None else augment
        parameters = chosen(self.model, adapts)
        if not parameters:
            raise ConfigError(f"PALM adapts {adapts!r} parameters and this network has none: adapts='all' takes every one")
        self.adapt(parameters, lr, optimizer)
        self.sizes = [parameter.numel() for parameter in parameters.values()]
        full = torch.promote_types(self.dtype, torch.float32)                   # in float16 EPS would be zero
        like = torch.zeros((), device=self.device, dtype=full)
        self.register_state("sensitivity", like.new_zeros(sum(self.sizes)))     # of all weights, tensor after tensor
        self.register_state("shares", like.new_zeros(len(self.sizes)))          # of `lr`, for each tensor

    def step(self, x: Tensor) -> Tensor:
        """Rates by one gradient, then a step by another."""
        assert self.descent is not None
        uniform = (self.logits(self.model, x) / self.temperature).log_softmax(1).sum(1).mean()
        made = self.descent.gradient(-uniform)
        with torch.no_grad():
            self.measure(self.descent.weights.gradients, made)
        self.descent.clear()
        if self.fresh:
            forget_steps(self, made)
        logits = self.give(self.logits(self.model, x))
        again = self.logits(self.model, self.augmented(x, self.augment))
        uncertainty, classes = entropy(logits), logits.shape[1]
        loss = masked_mean(uncertainty, reliable(uncertainty, self.margin, classes))
        loss = loss + self.consistency * classes * cross_entropy(again, logits).mean()
        self.descend(loss, after=[Scale(self.shares)], when=made)
        return logits

    def measure(self, gradients: Sequence[Tensor], made: Tensor) -> None:
        """Which tensors are selected, their sensitivity, and the share of the rate that follows from it."""
        selected = (torch.stack(torch._foreach_norm(list(gradients), 1)) <= self.threshold) & made
        products = [g.to(self.sensitivity.dtype) * p for g, p in zip(gradients, self.adapted.values(), strict=True)]
        now = torch.cat([product.flatten() for product in products]).abs()
        mean = self.momentum * self.sensitivity + (1 - self.momentum) * now
        ratio = ((now - mean).abs() + EPS) / (mean + EPS)
        shares = torch.stack([part.mean() for part in torch.split(ratio, self.sizes)])
        where = torch.cat([on.expand(size) for on, size in zip(selected, self.sizes, strict=True)])
        self.sensitivity = torch.where(where, mean, self.sensitivity)
        self.shares = torch.where(selected, shares, torch.zeros_like(shares) if self.frozen else self.shares)
