"""What the memory of `SmallBatch` keeps, worked out by hand, and what is said of a batch that taught nothing."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal import SmallBatch


class Told(nn.Module):
    """Every image says its own label (first pixel) and how sure of it to be (second pixel), of `classes` classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.fc = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        labels = nn.functional.one_hot(x[:, 0].long(), self.classes)
        return labels * x[:, 1:2] + 0 * self.fc.weight.sum()


class Learner(petal.Adapter):
    """Keeps what it was given to learn from."""

    def __init__(self, classes: int) -> None:
        super().__init__(Told(classes), batch_statistics=False)
        self.adapt(dict(self.model.named_parameters()), 0.0)
        self.batches: list[Tensor] = []

    def step(self, x: Tensor) -> Tensor:
        self.batches.append(x.clone())
        return self.prediction(x)


def image(label: int, sure: float = 60.0) -> Tensor:
    """One image [1, 2]; at 60 the prediction is certain."""
    return torch.tensor([[label, sure]])


def entropy(sure: float, classes: int) -> float:
    """Of a prediction with one logit at `sure` and the others at 0, in nats."""
    p = np.full(classes, 1.0)
    p[0] = np.exp(sure)
    p /= p.sum()
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_uncertainty_counts_as_a_share_of_the_largest_there_is(classes: int) -> None:
    """Half the way to a uniform prediction weighs as much as half the age allowed, whatever the number of classes.

    There is room for one of two samples of a class: a certain one that is 7 images older, where 10 are allowed, and a new
    one whose uncertainty is a little less or a little more than 7/10 of the largest.
    """
    for share, stays in ((0.65, "new"), (0.75, "old")):
        low, high = 0.0, 60.0                                       # bisection for the logit that has this uncertainty
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if entropy(middle, classes) > share * math.log(classes) else (low, middle)
        learner = Learner(classes)
        adapter = SmallBatch(learner, memory=2, every=8, age=10, shuffled=True, certainty=1.0)
        adapter(image(0))                                           # certain, and the first
        for _ in range(6):
            adapter(image(1))
        assert learner.batches == []
        adapter(image(0, low))                                      # 1 image old, and the first one 8
        kept = learner.batches[-1]
        certain = kept[kept[:, 0] == 0][:, 1].tolist()
        assert certain == ([60.0] if stays == "old" else [pytest.approx(low)]), (share, kept)


def test_a_sample_is_too_old_beyond_the_age_and_not_at_it() -> None:
    """The only one of its class stays until more than `age` images have come, its own counted."""
    learner = Learner(5)
    adapter = SmallBatch(learner, memory=2, every=1, age=4, shuffled=True)
    adapter(image(1))
    for _ in range(3):
        adapter(image(0))
    assert sorted(learner.batches[-1][:, 0].tolist()) == [0, 1]
    adapter(image(0))
    assert learner.batches[-1][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("kind", ["cotta", "petal"])
def test_the_share_restored_is_that_of_batches_that_were_learned_from(kind: str, engine: str) -> None:
    model = network()
    options = {"views": 0, "restore": petal.Stochastic(0.5)}
    method: petal.Adapter = petal.CoTTA(model, **options)
    if kind == "petal":
        method = petal.Petal(model, petal.DiagonalGaussian.isotropic(model, std=0.05), **options)
    adapter = SmallBatch(petal.accelerate(method, engine), memory=8, every=8)
    shares = []
    for seed, size in enumerate((8, 3, 3, 2, 1)):
        adapter(images(size, seed=seed))
        shares.append(float(adapter.restored))
    learned = [share > 0 for share in shares]
    assert learned == [True, False, False, True, False]
    assert all(abs(share - 0.5) < 0.1 for share in shares if share)


def test_the_memory_keeps_copies_of_a_batch_that_its_owner_uses_again() -> None:
    one, two = (petal.SmallBatch(petal.Tent(network()), memory=12, every=12) for _ in range(2))
    place = torch.empty(4, 3, 8, 8)
    for seed in range(3):
        one(place.copy_(images(4, seed=seed)))
        two(images(4, seed=seed))
    for name, value in two.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name


def test_a_memory_of_more_images_than_there_is_room_for_is_refused() -> None:
    large, small = (petal.SmallBatch(petal.Tent(network()), memory=size, every=64) for size in (12, 8))
    large(images(12))
    before = small.state_dict()
    with pytest.raises(petal.ConfigError, match="a memory of 12 images instead of up to 8"):
        small.load_state_dict(large.state_dict())
    assert small.state_dict().keys() == before.keys()
