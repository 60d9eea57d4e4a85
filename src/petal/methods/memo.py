"""MEMO: marginal entropy minimisation with one test point (Zhang et al., 2022)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from petal.augment import Augment, AugMix, Views
from petal.errors import ConfigError
from petal.losses import marginal_entropy
from petal.methods.base import Adapter, OptimizerFactory, Rates
from petal.methods.card import Card
from petal.methods.contrast import ADAPTS, chosen
from petal.methods.inputs import check_choice, check_number
from petal.methods.resets import restart
from petal.methods.state import rehearsed
from petal.norm import MixedNorm
from petal.order import Keys


class MEMO(Adapter):
    """Each image has an episode of its own: from the source's weights, `steps` down the entropy of the mean prediction of
    its `views` (eq. 2 and 3), then the answer for the image itself. Batches are worked through one by one.

    `augment` is given so many copies of an image at once, and draws for each; `Views` are then per sample. The image itself
    is not among them. Batch norms mix in the share `share` of what they see, views or one image, with an unbiased variance
    (`MixedNorm`): 0.1 in the collection, 1/17 in the authors' code. The defaults are those of CIFAR-10, by plain SGD as in
    the authors' code; the collection's has Nesterov momentum, which makes a first step 1.9 times as long:
    optimizer=SGD(0.9, nesterov=True). `adapts` is "all", as the authors have it, "weights" as the collection (parameters
    called so, and biases; on convolutional networks the same), "conv" or "norm". With episodic=False an episode goes on
    where the one before ended.
    """

    card = Card(
        title="MEMO", year=2022, adapts="all weights, for each image anew", small_batches=True, correlated_labels=True,
        paper="Zhang et al., MEMO: test time robustness via adaptation and augmentation, NeurIPS 2022",
    )  # fmt: skip
    alone = "it adapts to each image by itself, from the source's weights on"

    def __init__(
        self,
        model: nn.Module,
        lr: Rates = 5e-3,
        views: int = 32,
        share: float = 0.1,
        augment: Augment | None = None,
        adapts: str = "all",
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = True,
        seed: int | torch.Generator = 0,
    ) -> None:
        check_number("views", views, low=1, whole=True)
        check_number("share", share, low=0, high=1)
        check_number("steps", steps, low=1, whole=True)
        check_choice("adapts", adapts, ADAPTS)
        norm = None if share == 0 else lambda layer: MixedNorm(layer, share)
        super().__init__(model, batch_statistics=False, norm=norm, episodic=episodic, seed=seed)
        self.views, self.steps_each = views, steps
        augment = AugMix() if augment is None else augment
        self.augment = replace(augment, per_sample=True) if isinstance(augment, Views) else augment
        parameters = chosen(self.model, adapts)
        if not parameters:
            raise ConfigError(f"MEMO adapts {adapts!r} parameters and this network has none")
        self.adapt(parameters, lr, optimizer or torch.optim.SGD)
        self.start = self.origin()

    def step(self, x: Tensor) -> Tensor:
        """Predict images after an episode each."""
        with torch.no_grad():
            self.logits(self.model, x[:1])      # a network that cannot take one image refuses it before anything changes
        return torch.cat([self.answer(image[None]) for image in x])

    def answer(self, image: Tensor) -> Tensor:
        """An episode, and the logits [1, C] that it leads to."""
        if self.episodic:
            restart(self, self.start)
        for _ in range(self.steps_each):
            views = self.augmented(image[[0] * self.views], self.augment)
            self.descend(marginal_entropy(self.logits(self.model, views)))
        with torch.no_grad():
            return self.logits(self.model, image)

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        return rehearsed(self, x)

    def describe(self) -> dict[str, str]:
        """What it does and with which settings."""
        return super().describe() | {"learns": f"from {self.views} views of each image, {self.steps_each} times"}
