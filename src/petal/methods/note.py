"""NOTE: robust continual test-time adaptation against temporal correlation (Gong et al., 2022)."""

import torch
from torch import Tensor, nn

from petal.methods.affine import norm_parameters
from petal.methods.base import Adapter, OptimizerFactory
from petal.methods.card import AFFINE, Card
from petal.methods.inputs import check_number
from petal.methods.memory import PBRS
from petal.methods.state import rehearsed
from petal.norm import InstanceAwareNorm, following
from petal.order import Keys


class NOTE(Adapter):
    """Images are predicted one by one; the network learns from a memory balanced by its predictions.

    Batch norms are instance-aware (`InstanceAwareNorm`, eq. 3-6, beyond `shrink` standard errors). After every `every`
    samples, `epochs` steps on the entropy of the whole memory, and the running statistics move by the share `momentum` of
    the memory's. In the middle of a batch too: the images after it are predicted by the network of then. Defaults are those
    of the authors' script for CIFAR.

    The authors train their source with such norms: `petal.norm.instance_aware(network)` makes a network for that. One
    trained with plain batch norms works too; then the norms are put in the place of those, with their statistics. The loss
    is, as in their code, the mean over samples and classes, so it is smaller than the entropy by the number of classes.
    """

    card = Card(
        title="NOTE", year=2022, adapts=AFFINE, small_batches=True, correlated_labels=True,
        paper="Gong et al., NOTE: robust continual test-time adaptation against temporal correlation, NeurIPS 2022",
    )  # fmt: skip
    alone = "it keeps a memory of its own"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-4,
        memory: int = 64,
        every: int = 64,
        shrink: float = 4.0,
        momentum: float = 0.01,
        temperature: float = 1.0,
        epochs: int = 1,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        check_number("every", every, low=1, whole=True)
        check_number("epochs", epochs, low=1, whole=True)
        check_number("shrink", shrink, low=0)
        check_number("momentum", momentum, low=0, high=1)
        check_number("temperature", temperature, low=1e-6)
        super().__init__(
            model, batch_statistics=False, norm=lambda layer: InstanceAwareNorm(layer, shrink, momentum), steps=steps,
            episodic=episodic, seed=seed,
        )  # fmt: skip
        self.every, self.epochs, self.temperature = every, epochs, temperature
        self.memory = PBRS(self, memory)
        self.register_statistics("model")
        self.adapt(norm_parameters(self), lr, optimizer)

    def step(self, x: Tensor) -> Tensor:
        """Predict and remember, as far as the next update, then on with the network that it leaves (Alg. 1)."""
        answers = []
        for part, _ in self.memory.parts(len(x), self.every):
            with torch.no_grad():
                answers.append(self.logits(self.model, x[part]))
            self.memory.learn(x[part], answers[-1], self.every, self.update_from_memory)
        return torch.cat(answers)

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        updates = len(x) > self.every - self.memory.seen % self.every if isinstance(x, Tensor) and x.dim() else False
        return rehearsed(self, x) if updates or self.steps > 1 else super().predict(x)

    def update_from_memory(self) -> None:
        """Steps on the entropy of the memory."""
        for _ in range(self.epochs):
            x, _ = self.memory.samples()
            with following(self.model) as keep_if:
                p = (self.logits(self.model, x) / self.temperature).softmax(1)
            keep_if(self.descend(-(p * (p + 1e-6).log()).mean()))
