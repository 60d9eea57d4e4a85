"""OBAO: self-training that replays sure samples and keeps the relations of classes (Zhu et al., 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.augment import Augment
from petal.errors import ConfigError
from petal.losses import relations_kept
from petal.methods.base import OptimizerFactory
from petal.methods.card import Card
from petal.methods.contrast import classifier, prototypes_of
from petal.methods.descent import After, PutBack
from petal.methods.inputs import check_choice, check_number
from petal.methods.memory import LowEntropy
from petal.methods.self_training import SelfTraining
from petal.restore import Restore
from petal.statistics import SourceStatistics


class OBAO(SelfTraining):
    """Symmetric cross-entropy with a teacher, on the batch and a view; and from a memory, cross-entropy and class relations.

    The memory takes what the student is sure of, an entropy below `margin` · ln C, with the label of student and teacher
    together (`LowEntropy`); up to `memory_batch` of its samples are drawn for a step. Relations are the cosines between the
    class means of their features, held to those between the source's `prototypes` ("source"), or between the rows of its
    classifier ("weights"), which needs no source data. The classifier itself does not adapt. `consistency`, `replay` and
    `relation` are the weights of the losses; see `SelfTraining` for `answer` and `adapts`. `restore` follows the average.

    Of the released code's choices those that no published setting makes are left out: Euclidean relations, their squared
    error, warm-up and replay of source data.
    """

    card = Card(
        title="OBAO", year=2024, adapts="all weights but the classifier's", needs=("prototypes",),
        paper="Zhu et al., Reshaping the online data buffering and organizing mechanism for continual test-time adaptation, "
              "ECCV 2024",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        statistics: SourceStatistics | None = None,
        lr: float = 1e-3,
        ema: float = 0.999,
        margin: float = 0.1,
        memory: int = 1000,
        memory_batch: int = 200,
        consistency: float = 1.0,
        replay: float = 1.0,
        relation: float = 1.0,
        prototypes: str = "source",
        restore: Restore | None = None,
        augment: Augment | None = None,
        adapts: str = "weights",
        answer: str = "own",
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(
            model, ema=ema, consistency=consistency, augment=augment, answer=answer, adapts=adapts, steps=steps,
            episodic=episodic, seed=seed,
        )  # fmt: skip
        check_number("memory_batch", memory_batch, low=1, whole=True)
        check_number("replay", replay, low=0)
        check_number("relation", relation, low=0)
        check_choice("prototypes", prototypes, ("source", "weights"))
        self.replay, self.relation, self.restore, self.memory_batch = replay, relation, restore, memory_batch
        self.memory = LowEntropy(self, memory, margin)
        name, last = classifier(self.model)
        with torch.inference_mode(False):
            if prototypes == "weights" or not relation:
                self.organised = last.weight.detach().clone()
            elif statistics is None:
                raise ConfigError("OBAO takes source statistics with prototypes, or prototypes='weights' without")
            else:
                self.organised = prototypes_of(self, statistics)[0]
        self.begin(lr, optimizer, {}, without=[f"{name}.weight", f"{name}.bias"])
        self.start = self.origin()

    def step(self, x: Tensor) -> Tensor:
        """Predict by student and teacher, then one step of the student on all losses; then the memory takes the batch."""
        logits = self.logits(self.model, x)
        again = self.logits(self.model, self.augmented(x, self.augment))
        with torch.no_grad():
            target = self.logits(self.teacher, x)
        loss = self.consistency * self.self_training(logits, again, target)
        drawn = self.memory.drawn(self.memory_batch)
        if drawn is not None and (self.replay or self.relation):
            images, labels = drawn
            features, replayed = self.features(self.model, images)
            loss = loss + self.replay * F.cross_entropy(replayed, labels)
            loss = loss + self.relation * relations_kept(features, labels, self.organised)
        self.follow(loss)
        self.memory.add(x, self.memory.facts(logits.detach(), (logits + target).argmax(1)))
        return self.answered(logits.detach(), target)

    def after(self) -> list[After]:
        """The teacher's average, and the restore."""
        average = super().after()
        return average if self.restore is None else [*average, PutBack(self.restore, self.start)]
