"""Passes are counted where they happen: against hooks on the networks themselves."""

import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, needed, network
from petal.engine import Policy
from petal.evaluate import evaluate_batch

SMALL = {"views": 3, "confidence": 2.0}


class Counting(nn.Module):
    """A network that counts the samples that it is given, in all its copies, and those whose gradient comes back."""

    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        Counting.seen[0] += len(x)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self.back(len(x)))
        return logits

    def back(self, count: int) -> None:
        Counting.seen[1] += count


def made(name: str, model: nn.Module) -> petal.Adapter:
    method = petal.METHODS[name]
    options = SMALL if name in ("cotta", "petal") else {"views": 3} if name == "memo" else {}
    q = [petal.DiagonalGaussian.isotropic(model, 0.1)] if name == "petal" else []
    return method(model, *q, *needed(name, model), **options)


@pytest.mark.parametrize("name", list(petal.METHODS))
def test_passes_are_those_of_the_networks(name: str) -> None:
    adapter = made(name, Counting())
    for number in range(3):
        Counting.seen = [0, 0]
        record, _ = evaluate_batch(adapter, images(10, seed=number), number)
        assert [round(10 * record.forwards), round(10 * record.backwards)] == Counting.seen
        assert record.forwards >= 1


@pytest.mark.parametrize("name", ["tent", "cotta", "petal", "sar", "memo", "rotta"])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_an_engine_counts_the_same(name: str, low: torch.dtype | None) -> None:
    plain, fast = made(name, network()), petal.accelerate(made(name, network()), policy=Policy(low=low))
    for number in range(3):
        x = images(10, seed=number)
        (one, _), (other, _) = (evaluate_batch(adapter, x, number) for adapter in (plain, fast))
        assert (one.forwards, one.backwards) == (other.forwards, other.backwards)


def test_known_numbers() -> None:
    x, y = images(10), torch.arange(10) % 5
    for adapter, forwards, backwards in (
        (petal.Source(network()), 1, 0), (petal.Tent(network()), 1, 1), (petal.Tent(network(), steps=3), 3, 3),
        (petal.Tent(network(), episodic=True), 2, 1), (petal.SAR(network(), margin=10.0), 2, 2),
        (petal.CoTTA(network(), views=7, confidence=2.0), 9, 1), (petal.CoTTA(network(), views=7, confidence=0.0), 3, 1),
    ):  # fmt: skip
        result = petal.evaluate(adapter, [(x, y), (x, y)])
        assert [(r.forwards, r.backwards) for r in result.records] == [(forwards, backwards)] * 2, adapter.kind
    after = petal.evaluate(petal.Tent(network()), [(x, y)], after=True)
    assert after.records[0].forwards == 2
