
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.fakes import toy
from petal.data import from_arrays, streams
from petal.data.streams import correlated_order
from petal.errors import DataError

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


def _labels(stream):
    return torch.cat([batch.y for batch in stream]).numpy()


def _many(count=1200, classes=6):
    return from_arrays(torch.zeros(count, 3, 1, 1), np.random.default_rng(0).integers(0, classes, count), name="many")


def test_stretches_have_the_classes_of_the_runs_and_no_runs():
    data = _many()
    runs = _labels(streams.correlated(data, ["clean"]))
    mixed = _labels(streams.correlated(data, ["clean"], stretch=100))
    for at in range(0, len(data), 100):
        assert sorted(runs[at : at + 100]) == sorted(mixed[at : at + 100])
    assert _runs(mixed) > 3 * _runs(runs)


def test_runs_begin_and_end_by_turns():
    stream = streams.correlated(_many(), ["clean"] * 5, alternate=2)
    runs = [_runs(part) for part in _labels(stream).reshape(5, 1200)]
    assert max(runs[0], runs[1], runs[4]) < 150
    assert min(runs[2], runs[3]) > 900                      # five of six neighbours differ: 1000


def test_sources_have_runs_of_their_own_and_take_turns_at_random():
    stream = streams.correlated(_many(), ["clean", "clean"], sources=4, batch_size=50)
    batches = list(stream)
    assert all(len(batch.stream) == len(batch) and set(batch.stream) == {0, 1, 2, 3} for batch in batches)
    labels, index = _labels(stream), torch.cat([batch.index for batch in batches]).numpy()
    keys = np.array([key for batch in batches for key in batch.stream])
    assert sorted(index[:1200]) == list(range(1200))
    assert _runs(labels) > 1500                             # by themselves they look shuffled
    for key in range(4):
        assert (keys == key).sum() == 600
        assert _runs(labels[keys == key]) < 200
    assert 0.2 < (keys[1:] == keys[:-1]).mean() < 0.3       # a turn does not depend on the one before


@pytest.mark.parametrize("run", [2.0, 8.0])
def test_a_markov_chain_has_runs_of_the_mean_length_asked_for(run):
    labels = _labels(streams.markov(_many(6000), ["clean"], run=run))
    assert len(labels) / _runs(labels) == pytest.approx(run, rel=0.08)
    lengths = np.diff(np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1], [True]])))
    assert (lengths == 1).mean() == pytest.approx(1 / run, rel=0.15)      # geometric


def test_one_class_is_one_run_whatever_the_chain_says():
    data = from_arrays(torch.zeros(7, 3, 1, 1), [2] * 7, name="one")
    assert _labels(streams.markov(data, ["clean"])).tolist() == [2] * 7


@pytest.mark.parametrize(("name", "options"), [
    ("correlated", {"stretch": 0}), ("correlated", {"alternate": -1}), ("correlated", {"sources": 1.5}),
    ("correlated", {"concentration": 0}), ("markov", {"run": 0.5}), ("markov", {"run": float("nan")}),
])  # fmt: skip
def test_options_out_of_range_are_refused_by_name(name, options):
    with pytest.raises(DataError, match=next(iter(options))):
        streams.STREAMS[name](toy(), NAMES, **options)
