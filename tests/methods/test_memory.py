"""The memories by class, by hand."""

import math

import pytest
import torch

import petal
from networks import images, network
from petal.methods import CSTU, PBRS


def logits_for(labels: list[int], certainty: float = 8.0, classes: int = 3) -> torch.Tensor:
    return certainty * torch.nn.functional.one_hot(torch.tensor(labels), classes).double()


def kept(memory: petal.methods.Memory) -> list[int]:
    """The numbers in the stream of what is in it, class by class."""
    return [k.number for label in sorted(memory.held()) for k in memory.held()[label]]


def stream(memory: petal.methods.Memory, logits: torch.Tensor) -> None:
    x = torch.arange(memory.seen, memory.seen + len(logits)).double()[:, None]
    memory.learn(x, logits, 10**9, lambda: None)


def test_each_class_has_its_room_and_the_oldest_goes() -> None:
    memory = CSTU(petal.Source(network()), 6)                       # 2 a class
    stream(memory, logits_for([0, 0, 0]))
    assert kept(memory) == [1, 2]                                   # 0 and 1 are equally sure, 0 is older
    stream(memory, logits_for([1, 2, 1, 2]))
    assert kept(memory) == [1, 2, 3, 5, 4, 6]
    stream(memory, logits_for([2], certainty=0.1))
    assert kept(memory) == [1, 2, 3, 5, 4, 6]                       # less sure than any is old
    samples, ages = memory.samples()
    assert samples[:, 0].tolist() == [1, 2, 3, 5, 4, 6]
    assert ages.tolist() == [7, 6, 5, 3, 4, 2]


def test_age_and_uncertainty_are_weighed() -> None:
    for timeliness, uncertainty, expected in ((1.0, 0.0, [1, 2]), (0.0, 1.0, [0, 2]), (1.0, 1.0, [0, 2])):
        memory = CSTU(petal.Source(network()), 6, timeliness, uncertainty)
        stream(memory, torch.cat([logits_for([0]), logits_for([0], 1.0), logits_for([0], 4.0)]))
        assert kept(memory) == expected
    sure, age = logits_for([0])[0].softmax(0), 1
    score = 1 / (1 + math.exp(-age / 6)) - (sure * (sure + 1e-6).log()).sum().item() / math.log(3)
    memory = CSTU(petal.Source(network()), 6)
    stream(memory, logits_for([0]))
    assert memory.score(age, memory.held()[0][0].uncertainty) == pytest.approx(score, abs=1e-12)


def test_of_equally_bad_ones_the_last_goes() -> None:
    memory = CSTU(petal.Source(network()), 6, timeliness=0.0, uncertainty=1.0)
    stream(memory, torch.cat([logits_for([0, 0], 1.0), logits_for([0], 8.0)]))
    assert kept(memory) == [0, 2]


def test_a_small_class_takes_the_place_of_the_largest() -> None:
    memory = CSTU(petal.Source(network()), 4)                       # 1.33 a class: two fit
    stream(memory, logits_for([0, 0, 1, 1]))
    stream(memory, logits_for([2]))
    assert kept(memory) == [1, 2, 3, 4]                             # of classes 0 and 1, the oldest
    stream(memory, logits_for([2]))
    assert kept(memory) == [1, 3, 4, 5]


def test_what_is_not_finite_is_not_kept() -> None:
    for kind in (CSTU, PBRS):
        memory = kind(petal.Source(network()), 6)
        logits = logits_for([0, 1, 2])
        logits[1, 0] = float("nan")
        stream(memory, logits)
        assert kept(memory) == [0, 2]
        assert memory.seen == 3


def test_updates_come_where_they_are_due() -> None:
    memory, seen = CSTU(petal.Source(network()), 3), []
    for count in (2, 5, 1, 9):
        memory.learn(torch.zeros(count, 1), logits_for([0] * count), 4, lambda: seen.append(memory.seen))
    assert seen == [4, 8, 12, 16]
    assert memory.parts(7, 4) == [(slice(0, 3), True), (slice(3, 7), True)]
    assert memory.parts(2, 4) == [(slice(0, 2), False)]


def test_reservoir_of_each_class_is_uniform() -> None:
    """After 30 of one class in 5 places each is there with probability 1/6; Hoeffding's bound at 2,000 runs."""
    counts, owner = torch.zeros(30), petal.Tent(network(), seed=0)
    for _ in range(2000):
        memory = PBRS(owner, 5)
        stream(memory, logits_for([0] * 30))
        counts[kept(memory)] += 1
    assert (counts / 2000 - 1 / 6).abs().max() < 0.05


def test_reservoir_gives_room_to_a_new_class() -> None:
    memory = PBRS(petal.Source(network()), 6)
    stream(memory, logits_for([0] * 20 + [1, 2]))
    held = {label: [k.number for k in items] for label, items in memory.held().items()}
    assert (len(held[0]), held[1], held[2]) == (4, [20], [21])
    assert memory.owner.memory_counts.tolist() == [20, 1, 1]
    state = memory.owner.state_dict()
    assert state["state.memory_counts"].tolist() == [20, 1, 1]


def test_a_memory_is_state_of_its_method() -> None:
    class Keeps(petal.Tent):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model)
            self.memory = PBRS(self, 5)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().step(x)
            self.memory.learn(x, logits, 8, lambda: None)
            return logits

    adapter, other = Keeps(network()), Keeps(network())
    adapter(images())
    other.load_state_dict(adapter.state_dict())
    assert torch.equal(adapter(images(seed=1)), other(images(seed=1)))
    assert torch.equal(adapter.memory.samples()[0], other.memory.samples()[0])
    assert len(adapter.memory.samples()[0]) == 5
    adapter.reset()
    assert adapter.memory.seen == 0
    assert not adapter.memory.held()
