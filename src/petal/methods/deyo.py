"""DeYO: entropy minimisation on samples that are certain because of the shape of things (Lee et al., 2024)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petal.augment import Augment
from petal.destroy import Patches
from petal.errors import ConfigError
from petal.filters import masked_mean, reliable
from petal.functional import entropy
from petal.methods.affine import TOP_LAYERS, AffineAdapter
from petal.methods.base import OptimizerFactory
from petal.methods.card import AFFINE, NO_BATCH_NORM, Card
from petal.methods.inputs import check_choice, check_number


class DeYO(AffineAdapter):
    """Entropy of samples that are reliable, and whose class loses probability when the image is destroyed.

    A sample counts if its entropy is below `margin` · ln C and its predicted class loses more than `plpd` of its
    probability (PLPD; eq. 8). Its weight is exp(E_0 - H) + exp(PLPD) with E_0 = `weight_margin` · ln C (eq. 10).

    As in the released code, the destroyed images of the reliable samples go through the network as a batch of their own,
    with their own statistics: destroyed="reliable". Their number has to be known, so the host waits for the device. With
    "all" those of the whole batch do, in a shape that never changes: a little faster, and a little different. `destroy` is
    one of `petal.destroy` or a function of your own. The top layers stay as they are, by name, as in SAR.
    """

    card = Card(
        title="DeYO", year=2024, adapts=AFFINE, small_batches=NO_BATCH_NORM, correlated_labels=NO_BATCH_NORM,
        paper="Lee et al., Entropy is not enough for test-time adaptation, ICLR 2024",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        margin: float = 0.5,
        weight_margin: float = 0.4,
        plpd: float = 0.2,
        destroy: Augment = Patches(4),
        destroyed: str = "reliable",
        *,
        weigh_entropy: bool = True,
        weigh_plpd: bool = True,
        frozen: Sequence[str] = TOP_LAYERS,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, lr, frozen=frozen, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed)
        check_number("margin", margin, low=0)
        check_number("weight_margin", weight_margin, low=0)
        check_number("plpd", plpd, low=-2, high=1)
        check_choice("destroyed", destroyed, ("reliable", "all"))
        if not callable(destroy):
            raise ConfigError(f"destroy must be a function of images, such as petal.destroy.Patches(4), got {destroy!r}")
        self.margin, self.weight_margin, self.plpd = margin, weight_margin, plpd
        self.destroy, self.destroyed = destroy, destroyed
        self.weigh_entropy, self.weigh_plpd = weigh_entropy, weigh_plpd

    def step(self, x: Tensor) -> Tensor:
        """Predict, then one step on the samples that count; none if there are none."""
        logits = self.give(self.logits(self.model, x))
        loss, classes = entropy(logits), logits.shape[1]
        keep = reliable(loss, self.margin, classes)
        drop = self.drop(x, logits.detach(), keep)
        keep = keep & ~(drop <= self.plpd)
        weights = torch.zeros_like(drop)
        if self.weigh_entropy:
            weights = weights + 1 / torch.exp(loss.detach() - self.weight_margin * math.log(classes))
        if self.weigh_plpd:
            weights = weights + drop.exp()
        if self.weigh_entropy or self.weigh_plpd:
            loss = loss * weights
        self.descend(masked_mean(loss, keep), when=keep.any())
        return logits

    def drop(self, x: Tensor, logits: Tensor, keep: Tensor) -> Tensor:
        """PLPD: how much of its probability the predicted class loses; -2 where that was not asked."""
        chosen = self.apart(keep if self.destroyed == "reliable" else torch.ones_like(keep))
        found = torch.full_like(logits[:, 0], -2)
        if len(chosen) == 0:
            return found
        with torch.no_grad():
            source = self.views_of(x[chosen], self.destroy)
            after = self.logits(self.model, source.make(source.draw())).softmax(1)
        labels = logits[chosen].argmax(1, keepdim=True)
        found[chosen] = (logits[chosen].softmax(1).gather(1, labels) - after.gather(1, labels)).squeeze(1)
        return found
