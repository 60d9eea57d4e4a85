"""Streams of several sources through a method."""

import torch

import petal
from networks import network
from petal.data import from_arrays


def _stream(**options: int) -> petal.streams.Stream:
    data = from_arrays(torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(0)), [i % 5 for i in range(60)])
    return petal.streams.correlated(data, ["clean"], batch_size=12, **options)


def test_evaluation_hands_the_keys_on() -> None:
    apart = petal.Ordered(petal.Source(network()))
    petal.evaluate(apart, _stream(sources=3))
    assert len(apart.state_dict()["order.recent"]) == 3
    together = petal.Ordered(petal.Source(network()))
    petal.evaluate(together, _stream())
    assert len(together.state_dict()["order.recent"]) == 1


def test_predict_hands_the_key_on() -> None:
    adapter, x = petal.Ordered(petal.Source(network())), torch.rand(4, 3, 8, 8)
    petal.predict(adapter, x, stream="a")
    before = adapter.state_dict()
    again = petal.predict(adapter, x, adapt=False, stream="a")
    other = petal.predict(adapter, x, adapt=False, stream="b")
    assert not torch.equal(again.probabilities, other.probabilities)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())
