from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.fakes import toy
from petal.data import order, streams
from petal.data.streams import gradual_pairs
from petal.errors import DataError

from .kinds import NAMES, OTHER, examples

pytestmark = pytest.mark.usefixtures("fake")


@examples
@given(names=st.lists(st.sampled_from(order()), min_size=1, max_size=6), size=st.integers(1, 30))
def test_continual_batches_never_cross_a_domain(names, size):
    stream = streams.continual(toy(), names, severity=3, batch_size=size)
    assert stream.domains == [(name, 3) for name in names]
    per_domain = -(-23 // size)
    batches = list(stream)
    assert [batch.domain for batch in batches] == [name for name in names for _ in range(per_domain)]
    for k, batch in enumerate(batches):
        assert batch.domain_changed == (k > 0 and batches[k - 1].domain != batch.domain)
        assert set(batch.domains) == {batch.domain}
    for k in range(len(names)):
        index = torch.cat([batch.index for batch in batches[k * per_domain : (k + 1) * per_domain]])
        assert index.tolist() == list(range(23))


@pytest.mark.parametrize("family", ["standard-15", "imagenet-c", "cifar10-gradual"])
def test_published_orders_are_streamed(family):
    for number in range(1, 2 if family == "standard-15" else 11):
        stream = streams.continual(toy(2), f"{family}:{number}")
        assert [batch.domain for batch in stream] == list(order(family, number))


def test_standard_order_by_default():
    assert [name for name, _ in streams.continual(toy(2)).domains] == list(order("standard-15"))


def test_gradual_has_131_pairs_for_15_corruptions():
    stream = streams.gradual(toy(2))
    assert len(stream.domains) == len(list(stream)) == 131
    assert stream.domains[:5] == [("gaussian_noise", s) for s in (5, 4, 3, 2, 1)]
    assert stream.domains[5:7] == [("shot_noise", 1), ("shot_noise", 2)]
    assert [(b.domain, b.severity) for b in stream] == stream.domains


@examples
@given(st.lists(st.sampled_from(order()), min_size=1, max_size=15, unique=True))
def test_gradual_changes_by_one_step(names):
    pairs = gradual_pairs(names)
    assert len(pairs) == 5 + 9 * (len(names) - 1)
    assert pairs[0] == (names[0], 5)
    assert pairs[-1] == (names[-1], 1)
    for (a, s), (b, t) in pairwise(pairs):
        assert (a == b and abs(s - t) == 1) or (a != b and s == t == 1 and names.index(b) == names.index(a) + 1)
    for name in names[1:]:
        assert Counter(s for n, s in pairs if n == name) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 1}


def test_the_papers_example_of_gradual():
    text = "A5 A4 A3 A2 A1 B1 B2 B3 B4 B5 B4 B3 B2 B1 C1 C2 C3 C4 C5 C4 C3 C2 C1"
    assert " ".join(f"{name}{severity}" for name, severity in gradual_pairs("ABC")) == text


def test_recurring_visits():
    stream = streams.recurring(toy(), NAMES, visits=3, batch_size=23)
    batches = list(stream)
    assert [batch.domain for batch in batches] == NAMES * 3
    assert [batch.visit for batch in batches] == [0] * 3 + [1] * 3 + [2] * 3
    assert torch.equal(batches[1].x, batches[4].x)
    shuffled = list(streams.recurring(toy(), NAMES, visits=2, batch_size=23, shuffle=True))
    assert shuffled[0].index.tolist() != shuffled[3].index.tolist()
    once = list(streams.recurring(toy(), ["fog"], visits=2, batch_size=23))
    assert [batch.domain_changed for batch in once] == [False, False]


def test_own_domains():
    stream = streams.own([("day", toy()), ("night", OTHER)], batch_size=4)
    batches = list(stream)
    assert stream.domains == [("day", 0), ("night", 0)]
    assert torch.equal(torch.cat([b.x for b in batches if b.domain == "night"]), OTHER.batch(range(5))[0])
    assert [len(b) for b in batches] == [4, 4, 4, 4, 4, 3, 4, 1]
    assert len(streams.own([("day", toy()), ("night", OTHER)], images=3, batch_size=4)) == 2
    with pytest.raises(DataError, match="other has 5"):
        streams.own([("day", toy()), ("night", OTHER)], images=6)
    with pytest.raises(DataError, match="at least one"):
        streams.own([])
