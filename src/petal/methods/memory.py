"""Memories that methods learn from: few images, in which every predicted class has its room.

A memory is part of a method: its tensors are the method's declared state, so that `reset`, checkpoints and `predict` know
them. What stays is decided on the CPU, one sample after the other, from one transfer a batch; the images never leave
their device.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from petal.errors import InputError
from petal.functional import entropy
from petal.methods.base import Adapter
from petal.methods.inputs import check_number, check_remembered


class Kept(NamedTuple):
    """A sample in a memory: its place, predicted class and uncertainty, and its number in the stream."""

    place: int
    label: int
    number: int
    uncertainty: float


class Memory:
    """Up to `capacity` samples of a method's stream, by predicted class. A subclass writes `facts` and `choose`.

    In `step`, `learn(x, logits, every, update)` takes a batch in and calls `update` after each `every` samples of the
    stream, in the middle of a batch too. `samples()` gives what is in it, class by class and in order of arrival.
    """

    def __init__(self, owner: Adapter, capacity: int) -> None:
        check_number("memory", capacity, low=1, whole=True)
        self.owner: Any = owner
        self.capacity = capacity
        owner.batch_sizes = (*owner.batch_sizes, capacity)
        owner.register_state("memory_samples", None)                                    # [capacity, ...]
        owner.register_state("memory_facts", torch.full((capacity, 3), -1.0).double())  # label or -1, number, uncertainty
        owner.register_state("memory_seen", torch.zeros((), dtype=torch.int64))         # samples of the stream so far

    @abstractmethod
    def facts(self, logits: Tensor) -> Tensor:
        """What `choose` has to know of each sample, on the CPU [N, 2 + ...]: label (-1: not to be kept), uncertainty."""

    @abstractmethod
    def choose(self, held: dict[int, list[Kept]], label: int, facts: Sequence[float], seen: int) -> Kept | bool:
        """True if a new sample is taken in, or the one whose place it takes; False if it is not."""

    @property
    def seen(self) -> int:
        """Samples of the stream so far."""
        return int(self.owner.memory_seen)

    def learn(self, x: Tensor, logits: Tensor, every: int, update: Callable[[], None]) -> None:
        """Take a batch in, with the predictions that label it; update whenever `every` more samples have come."""
        facts = self.facts(logits)
        for part, due in self.parts(len(x), every):
            self.add(x[part], facts[part])
            if due and self.held():
                update()

    def parts(self, count: int, every: int) -> list[tuple[slice, bool]]:
        """The next samples in parts, none of which goes on beyond an update; and if one is due after the part."""
        ends = [*range(every - self.seen % every, count, every), count]
        return [(slice(a, b), (self.seen + b) % every == 0) for a, b in zip([0, *ends], ends, strict=False)]

    def add(self, x: Tensor, facts: Tensor) -> None:
        """Take samples in, one after the other."""
        owner = self.owner
        check_remembered(x)
        if owner.memory_samples is None:
            owner.memory_samples = x.new_zeros(self.capacity, *x.shape[1:])
        if owner.memory_samples.shape[1:] != x.shape[1:]:
            size = list(owner.memory_samples.shape[1:])
            raise InputError(f"the batch has shape {list(x.shape)} and the memory holds samples of {size}: give one size")
        held, seen, written = self.held(), self.seen, {}
        free = sorted(set(range(self.capacity)) - {kept.place for items in held.values() for kept in items}, reverse=True)
        for index, (label, *rest) in enumerate(facts.tolist()):
            taken = label >= 0 and self.choose(held, int(label), rest, seen)
            if taken is not False:
                if isinstance(taken, Kept):
                    held[taken.label].remove(taken)
                    free.append(taken.place)
                kept = Kept(free.pop(), int(label), seen, rest[0])
                held.setdefault(kept.label, []).append(kept)
                written[kept.place] = index
            seen += 1
        if written:
            places, indices = torch.tensor([[*written], [*written.values()]]).to(x.device)
            owner.memory_samples = owner.memory_samples.index_copy(0, places, x[indices])
            rows = [[-1.0] * 3 for _ in range(self.capacity)]
            for kept in (kept for items in held.values() for kept in items):
                rows[kept.place] = [kept.label, kept.number, kept.uncertainty]
            owner.memory_facts = torch.tensor(rows, dtype=torch.float64)
        owner.memory_seen = torch.tensor(seen)

    def held(self) -> dict[int, list[Kept]]:
        """What is in it, by class, each in order of arrival."""
        rows = enumerate(self.owner.memory_facts.tolist())
        found: dict[int, list[Kept]] = {}
        for kept in sorted((Kept(n, int(a), int(b), c) for n, (a, b, c) in rows if a >= 0), key=lambda kept: kept.number):
            found.setdefault(kept.label, []).append(kept)
        return found

    def samples(self) -> tuple[Tensor, Tensor]:
        """The samples [n, ...] and their ages [n] in samples of the stream, class by class and in order of arrival."""
        held, images = self.held(), self.owner.memory_samples
        order = [kept for label in sorted(held) for kept in held[label]]
        places, ages = torch.tensor([[kept.place, self.seen - kept.number] for kept in order]).to(images.device).unbind(1)
        return images[places], ages


class CSTU(Memory):
    """RoTTA's category-balanced memory by timeliness and uncertainty (Yuan et al., 2023, sec. 3.3 and Alg. 1).

    A class has room for capacity / classes samples. What is old and uncertain goes first: a newcomer takes the place of the
    worst of its class, or of the largest classes if its own is small and the memory full, unless it is no better itself.
    """

    def __init__(self, owner: Adapter, capacity: int, timeliness: float = 1.0, uncertainty: float = 1.0) -> None:
        super().__init__(owner, capacity)
        check_number("timeliness", timeliness, low=0)
        check_number("uncertainty", uncertainty, low=0)
        self.timeliness, self.uncertainty, self.classes = timeliness, uncertainty, 2

    def facts(self, logits: Tensor) -> Tensor:
        """Label and entropy."""
        self.classes = logits.shape[1]
        p = logits.detach().softmax(1)
        entropy = -(p * (p + 1e-6).log()).sum(1).double()
        return torch.stack([p.argmax(1).double().where(entropy.isfinite(), -1.0), entropy], 1).cpu()

    def choose(self, held: dict[int, list[Kept]], label: int, facts: Sequence[float], seen: int) -> Kept | bool:
        """The worst of those it competes with; of equal ones the last."""
        rivals = held.get(label, [])
        if len(rivals) < self.capacity / self.classes:
            if sum(map(len, held.values())) < self.capacity:
                return True
            most = max(map(len, held.values()))
            rivals = [kept for other in sorted(held) if len(held[other]) == most for kept in held[other]]
        worst = max(reversed(rivals), key=lambda kept: self.score(seen - kept.number, kept.uncertainty))
        return worst if self.score(seen - worst.number, worst.uncertainty) > self.score(0, facts[0]) else False

    def score(self, age: int, entropy: float) -> float:
        """How much a sample deserves to go (eq. 6)."""
        recency = self.timeliness / (1 + math.exp(-age / self.capacity))
        return recency + self.uncertainty * entropy / math.log(max(self.classes, 2))


class LowEntropy(Memory):
    """OBAO's memory of what the method was sure of: samples whose entropy is below `margin` · ln C, with a label.

    In a full memory the newcomers of a batch take the places of the samples of highest entropy, even if theirs is higher, as
    in the released code; more newcomers than there are places are dropped.
    """

    def __init__(self, owner: Adapter, capacity: int, margin: float) -> None:
        super().__init__(owner, capacity)
        check_number("margin", margin, low=0)
        self.margin = margin
        self.leaving: list[Kept] | None = None

    def facts(self, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        """Label, by default that of the logits, and entropy."""
        uncertainty = entropy(logits.detach())
        sure = uncertainty < self.margin * math.log(logits.shape[1])
        labels = logits.detach().argmax(1) if labels is None else labels
        return torch.stack([labels.double().where(sure, -1.0), uncertainty.double()], 1).cpu()

    def add(self, x: Tensor, facts: Tensor) -> None:
        """Take samples in, one after the other."""
        self.leaving = None
        super().add(x, facts)
        self.leaving = None

    def choose(self, held: dict[int, list[Kept]], label: int, facts: Sequence[float], seen: int) -> Kept | bool:
        """A free place, or that of the next to leave: those that were there when it became full, the least sure first."""
        if sum(map(len, held.values())) < self.capacity:
            return True
        if self.leaving is None:
            every = (kept for items in held.values() for kept in items)
            self.leaving = sorted(every, key=lambda kept: kept.uncertainty)
        return self.leaving.pop() if self.leaving else False

    def drawn(self, count: int) -> tuple[Tensor, Tensor] | None:
        """The samples and their labels, or so many by chance where there are more; None if there is none."""
        owner = self.owner
        labels = owner.memory_facts[:, 0]
        places = (labels >= 0).nonzero().flatten()
        if not len(places):
            return None
        labels, places = labels[places].long().to(owner.device), places.to(owner.device)
        if len(places) > count:
            chance = torch.rand(len(places), generator=owner.generator, device=owner.device, dtype=torch.float64)
            chosen = chance.argsort()[:count]
            labels, places = labels[chosen], places[chosen]
        return owner.memory_samples[places], labels


class PBRS(Memory):
    """NOTE's prediction-balanced reservoir sampling (Gong et al., 2022, Alg. 1).

    In a full memory, a sample of a class that is not among the largest takes a random place of a largest one; another takes
    a random place of its own class, with probability (kept of the class) / (seen of the class). Its random numbers are the
    method's: three for each sample.
    """

    def __init__(self, owner: Adapter, capacity: int) -> None:
        super().__init__(owner, capacity)
        owner.register_state("memory_counts", None)                                     # [classes], seen of each

    def facts(self, logits: Tensor) -> Tensor:
        """Label, no uncertainty, and the numbers drawn: which class, which of its samples, whether at all."""
        if self.owner.memory_counts is None:
            self.owner.memory_counts = torch.zeros(logits.shape[1], dtype=torch.int64)
        drawn = torch.rand(len(logits), 3, generator=self.owner.generator, device=logits.device, dtype=torch.float64)
        label = logits.detach().argmax(1).double().where(logits.isfinite().all(1), -1.0)
        return torch.cat([label[:, None], torch.zeros_like(label)[:, None], drawn], 1).cpu()

    def add(self, x: Tensor, facts: Tensor) -> None:
        """Take samples in, one after the other."""
        self.counts = self.owner.memory_counts.tolist()
        super().add(x, facts)
        self.owner.memory_counts = torch.tensor(self.counts)

    def choose(self, held: dict[int, list[Kept]], label: int, facts: Sequence[float], seen: int) -> Kept | bool:
        """By chance, as the text above says."""
        self.counts[label] += 1
        _, which, place, chance = facts
        if sum(map(len, held.values())) < self.capacity:
            return True
        most = max(map(len, held.values()))
        largest = [other for other in sorted(held) if len(held[other]) == most]
        if label in largest and chance > most / self.counts[label]:
            return False
        rivals = held[label if label in largest else largest[int(which * len(largest))]]
        return rivals[int(place * len(rivals))]
