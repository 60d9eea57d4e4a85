"""Small batches and correlated labels: predictions that need no batch, and batches of one's own to adapt to.

A stream that brings one image at a time, or long runs of one class, breaks what methods with batch statistics live by: a
batch that looks like the data. `SmallBatch` goes around any of them and takes both jobs of the batch away from it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petal.errors import ConfigError, InputError
from petal.functional import entropy
from petal.methods.base import Adapter
from petal.methods.inputs import check_batch, check_number, check_remembered
from petal.methods.network import logits_of
from petal.methods.wrapper import Wrapper
from petal.norm import with_recent_norm
from petal.order import Keys


class SmallBatch(Wrapper):
    """Lets a method work from batches of one image up, and with labels that come in runs.

    Predictions are made at once, by the network that the method predicts with (the teacher, where there is one). Its batch
    norms use running estimates that begin at the source's statistics, follow the last `window` images class by class (the
    labels are those predicted), count every class the same, and mix in the share `source` of the source's statistics and
    the share `own` of each image's (`petal.norm.RecentNorm`). A batch of several images is predicted twice, the second time
    with what its own images say, which counts the more the more classes they are of: runs of one class say little of a
    domain.

    Learning happens in batches of fixed size `memory`, at most one per call and one for every `every` images: those in a
    memory in which every predicted class has the same room, the recent and certain samples stay, and those older than `age`
    images go first. The method does with such a batch what it always does.

    Networks without batch norm work too: then only the memory matters. The views of CoTTA and Petal serve learning alone.
    """

    prefix = "small."
    views_used = False
    by_batch = False

    def __init__(
        self,
        adapter: Adapter,
        memory: int = 64,
        every: int = 64,
        age: int = 512,
        window: float = 100.0,
        source: float = 0.1,
        own: float = 0.1,
    ) -> None:
        super().__init__(adapter)
        if isinstance(adapter, Wrapper) and not adapter.inner:
            raise ConfigError(f"SmallBatch goes directly around a method; {adapter.kind} is wrapped already: swap the two")
        if adapter.alone:
            raise ConfigError(f"SmallBatch makes no sense around {adapter.kind}: {adapter.alone}")
        check_number("memory", memory, low=2, whole=True)
        check_number("every", every, low=1, whole=True)
        check_number("age", age, low=1, whole=True)
        check_number("window", window, low=1)
        check_number("source", source, low=0, high=1)
        check_number("own", own, low=0, high=1)
        self.memory, self.every, self.age = memory, every, age
        target = getattr(adapter, "teacher", adapter.model)
        self._network, self._norms = with_recent_norm(target, window=window, source=source, own=own)
        self.reset_own()

    def reset_own(self) -> None:
        """Estimates at the source's statistics, an empty memory."""
        self._samples: Tensor | None = None         # [up to memory, ...]
        self._facts: Tensor | None = None           # [up to memory, 3]: label, entropy, number in the stream
        self._seen, self._waiting = 0, 0            # images so far, and since the method last learned
        for layer in self._norms:
            layer.restart()

    def inner_shape(self, shape: Sequence[int] | None) -> Sequence[int] | None:
        """The method inside sees batches from the memory, whatever the stream brings."""
        return None if shape is None else (self.memory, *shape[1:])

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict at once; remember the samples; let the method learn from the memory when it is time."""
        if self.stopped:
            return self.predict(x)
        with self._checked(x) as x:
            self.adapter.restored = 0.0             # what it learned from an earlier batch is not of this one
            logits = self._predicted(x)
            self._remember(x, logits)
            if self._waiting >= self.every and self._samples is not None and len(self._samples) == self.memory:
                self._waiting = 0
                if self.adapted:
                    self.adapter(self._samples)
            return logits

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        with self._checked(x) as x:
            kept = [layer.recent for layer in self._norms]
            try:
                return self._predicted(x)
            finally:
                for layer, recent in zip(self._norms, kept, strict=True):
                    layer.recent = recent

    def describe(self) -> dict[str, str]:
        """What it does and with which settings, and those of the adapter inside."""
        return self.adapter.describe() | {"small": f"learns every {self.every} images from a memory of {self.memory}"}

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits by these parameters and the present estimates; nothing changes."""
        with self._checked(x) as x:
            return logits_of(lambda *args, **named: functional_call(self._network, dict(parameters), args, named), x)

    @contextmanager
    def _checked(self, x: Tensor) -> Iterator[Tensor]:
        check_remembered(x)
        check_batch(x, self.device, self.dtype)
        if self._samples is not None and x.shape[1:] != self._samples.shape[1:]:
            size = list(self._samples.shape[1:])
            raise InputError(f"the batch has shape {list(x.shape)} and the memory holds samples of {size}: give one size")
        with self._guarded(x) as x, torch.no_grad():
            yield x

    def _predicted(self, x: Tensor) -> Tensor:
        """Logits, and estimates that have followed the batch."""
        logits = logits_of(self._network, x)
        before = [layer.recent for layer in self._norms]
        for layer in self._norms:
            layer.learn(logits.argmax(1), logits.shape[1])
        if len(x) == 1 or not self._norms:
            return logits
        after = [layer.recent for layer in self._norms]
        share = diversity(logits)
        for layer, old, new in zip(self._norms, before, after, strict=True):
            layer.recent = old.expand_as(new).lerp(new, share)
        logits = logits_of(self._network, x)
        for layer, new in zip(self._norms, after, strict=True):
            layer.recent = new
        return logits

    def _remember(self, x: Tensor, logits: Tensor) -> None:
        """Take the samples into the memory: every class has the same room, the recent and certain ones stay."""
        n, classes = logits.shape
        number = torch.arange(self._seen, self._seen + n, device=x.device, dtype=torch.float64)
        facts = torch.stack([logits.argmax(1).double(), entropy(logits).double(), number], 1)
        self._seen, self._waiting = self._seen + n, self._waiting + n
        if self._samples is not None and self._facts is not None:
            x, facts = torch.cat([self._samples, x]), torch.cat([self._facts, facts])
        if len(x) > self.memory:
            chosen = self._chosen(facts, classes)
            x, facts = x[chosen], facts[chosen]
        self._samples, self._facts = x.clone(), facts

    def _chosen(self, facts: Tensor, classes: int) -> Tensor:
        """Which samples stay: the best of each class before the second best of any; those too old come last."""
        labels, uncertainty, number = facts.unbind(1)
        age = self._seen - number
        order = (age / self.age + uncertainty / math.log(max(classes, 2))).argsort(stable=True)       # best first
        members = nn.functional.one_hot(labels.long()[order], classes)
        place = (members.cumsum(0) * members).sum(1)                                # 1 is the best of its class
        place = torch.where(age[order] > self.age, place + len(order), place)
        return order[place.argsort(stable=True)][: self.memory]

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """Estimates, memory and counters."""
        state = {f"norm.{number}": layer.recent.clone() for number, layer in enumerate(self._norms)}
        state["counters"] = torch.tensor([self._seen, self._waiting])
        if self._samples is not None and self._facts is not None:
            state |= {"samples": self._samples.clone(), "facts": self._facts.clone()}
        return state

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes; the number of classes and the memory's images are the state's to say."""
        fixed = ["counters", *(f"norm.{number}" for number in range(len(self._norms)))]
        problems = [f"missing 'small.{key}'" for key in fixed if key not in state]
        problems += [f"unexpected 'small.{key}'" for key in state if key not in (*fixed, "samples", "facts")]
        for number, layer in enumerate(self._norms):
            shape = list(state[f"norm.{number}"].shape) if f"norm.{number}" in state else [2, 1, layer.start.shape[1]]
            if len(shape) != 3 or shape[0] != 2 or shape[2] != layer.start.shape[1]:
                problems.append(f"'small.norm.{number}' is {shape} instead of [2, classes, {layer.start.shape[1]}]")
        size = len(state["samples"]) if "samples" in state else 0
        if ("samples" in state) != ("facts" in state) or size > self.memory or (size and len(state["facts"]) != size):
            problems.append(f"'small.samples' is a memory of {size} images instead of up to {self.memory} with their facts")
        return problems

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        for number, layer in enumerate(self._norms):
            layer.recent = state[f"norm.{number}"].to(layer.start, copy=True)
        self._seen, self._waiting = map(int, state["counters"].tolist())
        self._samples = state["samples"].to(self.device, self.dtype, copy=True) if "samples" in state else None
        self._facts = state["facts"].to(self.device, copy=True) if "facts" in state else None


def diversity(logits: Tensor) -> Tensor:
    """How many classes a batch is of, as a share: 0 for one, 1 for all alike; squared, so that a few count for little.

    >>> diversity(torch.tensor([[9.0, -9, -9], [9, -9, -9]])).item() < 1e-3, diversity(torch.zeros(2, 3)).item()
    (True, 1.0)
    """
    mean = logits.softmax(1).mean(0)
    effective: Tensor = torch.special.entr(mean).sum().exp()
    return ((effective - 1) / max(logits.shape[1] - 1, 1)).clamp(0, 1).square()
