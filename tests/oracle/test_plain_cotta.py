"""The library's CoTTA and views against those of `oracle.plain_cotta`, which share no code with them."""

import importlib
from itertools import count

import pytest
import torch
from torch import Tensor

import petal
from networks import images, network


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(petal, "METHODS", dict(petal.METHODS))  # the plugin's own method is for those who ask for it
    return importlib.import_module("oracle.plain_cotta")


def fixed_views():
    numbers = count()
    return lambda x: (x.roll(next(numbers) % 3, -1) * 0.9).clamp(0, 1)


@pytest.mark.parametrize("confidence", [2.0, 0.58])
def test_the_same_steps(plain, confidence: float) -> None:
    model = network(dtype=torch.float64)
    ours = petal.CoTTA(model, views=4, confidence=confidence, restore=None, augment=fixed_views(), ema=0.9)
    theirs = plain.PlainCoTTA(model, views=4, confidence=confidence, restore=0.0, augment=fixed_views(), ema=0.9)
    opened = []
    for seed in (1, 0, 3, 2, 5, 4):  # while the gate has never opened, both learn from rounding alone
        x = images(12, seed=seed).double() * (1 - 0.15 * seed)
        assert torch.allclose(ours(x), theirs(x), atol=1e-9)
        assert ours.views_used == theirs.views_used
        opened.append(ours.views_used)
    assert len(set(opened)) == (2 if confidence == 0.58 else 1)
    for a, b in zip(ours.teacher.parameters(), theirs.teacher.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_the_same_kind_of_views(plain) -> None:
    """Over many draws: light, contrast, change, and differences of neighbours and of the colours."""
    x = petal.corrupt(petal.data.digits("test").batch(torch.arange(16))[0], "brightness", severity=1)
    x = (x + torch.tensor([0.0, 0.1, 0.25]).view(3, 1, 1)).clamp(0, 1)
    generator = torch.Generator().manual_seed(0)
    views = petal.Views(per_sample=False)

    def facts(v: Tensor) -> Tensor:
        right, down, colours = v.diff(dim=-1).abs(), v.diff(dim=-2).abs(), v.diff(dim=1).abs()
        return torch.stack([v.mean(), v.std(), (v - x).abs().mean(), right.mean(), down.mean(), colours.mean()])

    ours, theirs = (
        torch.stack([facts(make()) for _ in range(600)]).double()
        for make in (lambda: views(x, generator=generator), lambda: plain.view(x, generator))
    )
    error = ((ours.var(0) + theirs.var(0)) / len(ours)).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 3 * error).all()
    assert (ours.std(0) / theirs.std(0)).log().abs().max() < 0.2
