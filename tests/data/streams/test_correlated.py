
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.fakes import toy
from petal.data import streams
from petal.data.streams import correlated_order

from .kinds import NAMES, examples

pytestmark = pytest.mark.usefixtures("fake")


@examples
@given(
    concentration=st.floats(1e-6, 1e4),
    slots=st.none() | st.integers(1, 40),
    size=st.integers(1, 30),
    seed=st.integers(0, 5),
    images=st.integers(1, 23),
)
def test_correlated_has_every_image_once_a_domain(concentration, slots, size, seed, images):
    stream = streams.correlated(
        toy(), NAMES, concentration=concentration, slots=slots, batch_size=size, seed=seed, images=images
    )
    for name in NAMES:
        index = torch.cat([batch.index for batch in stream if batch.domain == name])
        assert sorted(index.tolist()) == list(range(images))


def _runs(labels):
    return 1 + int((labels[1:] != labels[:-1]).sum())


def test_correlation_grows_as_the_concentration_falls():
    labels = np.random.default_rng(0).integers(0, 10, 2000)

    def spread(concentration):
        """Mean number of classes among 50 neighbours."""
        arrived = labels[correlated_order(labels, concentration, 20, np.random.default_rng(1))]
        return np.mean([len(set(part)) for part in arrived.reshape(-1, 50)])

    assert spread(0.01) < spread(0.5) < spread(100)
    assert spread(0.01) < 2.5
    one_slot_each = labels[correlated_order(labels, 1e-6, None, np.random.default_rng(1))]
    assert _runs(one_slot_each) == 10       # a class is a single run when no class is divided
    equal_shares = labels[correlated_order(labels, 1e8, 20, np.random.default_rng(1))]
    for part in np.array_split(equal_shares, 20):
        assert len(set(part)) == 10         # and everywhere alike when all shares are equal


def test_classes_take_turns_in_every_slot_in_an_order_of_its_own():
    labels = np.arange(400) % 4
    arrived = labels[correlated_order(labels, 1e8, 10, np.random.default_rng(0))].reshape(10, 40)
    assert all(_runs(slot) == 4 for slot in arrived)
    assert len({tuple(slot) for slot in arrived}) > 3


def test_correlated_differs_between_domains_and_seeds():
    first, second = (
        {b.domain: b.index.tolist() for b in streams.correlated(toy(), NAMES, seed=seed)} for seed in (0, 1)
    )
    assert first["fog"] != first["snow"]
    assert first["fog"] != second["fog"]
