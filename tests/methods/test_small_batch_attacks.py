"""What crafted images do to `SmallBatch`, and what is left of it afterwards: it must not lock in."""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import petal
from methods.trained import images, model
from petal.augment import Views
from petal.recommended import flagship

BATCH, CRAFTED, BEFORE, ATTACKED, AFTER = 50, 20, 8, 60, 20


def clean(number: int) -> tuple[Tensor, Tensor]:
    x, y = images()
    chosen = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(number))
    return x[chosen].clone(), y[chosen]


def constant(x: Tensor, adapter: petal.Adapter) -> Tensor:
    x[:CRAFTED] = torch.tensor([0.9, 0.2, 0.2])[:, None, None]
    return x


def one_class(x: Tensor, adapter: petal.Adapter) -> Tensor:
    every, labels = images()
    threes = every[labels == 3]
    x[:CRAFTED] = threes[torch.randint(len(threes), (CRAFTED,), generator=torch.Generator().manual_seed(int(x.sum())))]
    return x


def against_it(x: Tensor, adapter: petal.Adapter) -> Tensor:
    """Toward class 0, by the gradient of its own teacher."""
    part = x[:CRAFTED]
    for _ in range(4):
        part = part.detach().requires_grad_()
        loss = F.cross_entropy(adapter.teacher(part), torch.zeros(CRAFTED, dtype=torch.int64))
        (gradient,) = torch.autograd.grad(loss, part)
        part = (part - 0.05 * gradient.sign()).clamp(0, 1)
    x[:CRAFTED] = part.detach()
    return x


def huge(x: Tensor, adapter: petal.Adapter) -> Tensor:
    x[0] = 1e4
    return x


def overflowing(x: Tensor, adapter: petal.Adapter) -> Tensor:
    x[0] = 1e20
    return x


def made(guard: bool = False) -> petal.Adapter:
    adapter: petal.Adapter = petal.SmallBatch(petal.Petal(model(), **flagship(Views(flip=0.0))), memory=100, every=50)
    return petal.Guard(adapter) if guard else adapter


def wrong(adapter: petal.Adapter, numbers: range) -> float:
    """Error in per cent over clean batches, while it goes on."""
    found = [(adapter(x).argmax(1) != y).double().mean() for x, y in map(clean, numbers)]
    return 100 * float(torch.stack(found).mean())


@cache
def untouched() -> tuple[float, float]:
    """The error in the second ten clean batches of one that was never attacked, and of the source."""
    adapter = made()
    wrong(adapter, range(BEFORE + ATTACKED + AFTER // 2))
    last = range(BEFORE + ATTACKED + AFTER // 2, BEFORE + ATTACKED + AFTER)
    return wrong(adapter, last), wrong(petal.Source(model()), last)


@pytest.mark.parametrize("attack", [constant, one_class, against_it, huge, overflowing])
def test_it_comes_back(attack: object) -> None:
    """Within twenty clean batches it is within three points of where it would have been."""
    expected, source_error = untouched()
    assert expected < source_error                                          # there is something to lose
    adapter = made()
    wrong(adapter, range(BEFORE))
    for number in range(BEFORE, BEFORE + ATTACKED):
        x = attack(clean(number)[0], adapter)  # type: ignore[operator]
        adapter(x[torch.randperm(BATCH, generator=torch.Generator().manual_seed(number))])
    wrong(adapter, range(BEFORE + ATTACKED, BEFORE + ATTACKED + AFTER // 2))
    now = wrong(adapter, range(BEFORE + ATTACKED + AFTER // 2, BEFORE + ATTACKED + AFTER))
    assert now < expected + 3
    assert all(value.isfinite().all() for value in adapter.state_dict().values())


def test_images_out_of_proportion_are_not_learned_from() -> None:
    adapter = made()
    for number in range(4):
        x, _ = clean(number)
        answers = adapter(huge(x, adapter))
        assert answers[1:].isfinite().all()
    assert adapter.state_dict()["small.samples"].max() <= 1
    assert adapter.skipped == 0
    first = made()                                                          # one that comes first is found out later
    first(torch.full((1, 3, 16, 16), 1e4))
    first(clean(0)[0])
    assert first.state_dict()["small.samples"].max() <= 1


def test_a_rollback_takes_estimates_and_order_along() -> None:
    guard = made(guard=True)
    assert isinstance(guard, petal.Guard)
    wrong(guard, range(4))
    guard.freeze()
    kept = {k: v for k, v in guard.adapter.state_dict().items() if k.startswith("small.norm.")}
    guard._snapshots.good = guard._snapshots.copy()
    for number in range(4, 8):
        guard(constant(clean(number)[0], guard))
    moved = guard.adapter.state_dict()
    assert any(not torch.equal(moved[key], kept[key]) for key in kept)      # they follow the stream while learning is off
    weights = {key: value.clone() for key, value in guard.weights().items()}
    guard.rollback()
    back = guard.adapter.state_dict()
    assert all(torch.equal(back[key], kept[key]) for key in kept)
    assert all(torch.equal(guard.weights()[key], weights[key]) for key in weights)      # nothing was learned meanwhile
    assert "small.samples" not in back
    again = made(guard=True)
    again.load_state_dict(guard.state_dict())
    assert torch.equal(again(clean(9)[0]), guard(clean(9)[0]))
