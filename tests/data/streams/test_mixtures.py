from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.fakes import fake_corrupt, fake_keys, toy
from petal.data import order, streams
from petal.data.streams.mixtures import walk_step

from .kinds import NAMES, by_image, examples

pytestmark = pytest.mark.usefixtures("fake")


@examples
@given(
    names=st.lists(st.sampled_from(order()), min_size=1, max_size=5, unique=True),
    size=st.integers(1, 40),
    seed=st.integers(0, 5),
    images=st.integers(1, 23),
)
def test_mixed_has_every_image_of_every_domain_once(names, size, seed, images):
    stream = streams.mixed(toy(), names, batch_size=size, seed=seed, images=images)
    seen = Counter((d, int(i)) for batch in stream for d, i in zip(batch.domains, batch.index, strict=True))
    assert seen == {(name, i): 1 for name in names for i in range(images)}
    assert {batch.domain for batch in stream} == {"mixed"}


def test_mixed_images_are_those_of_the_single_domains():
    whole = by_image(streams.mixed(toy(), NAMES, batch_size=9))
    for name in NAMES:
        for key, image in by_image(streams.single(toy(), name)).items():
            assert torch.equal(image, whole[key])


def test_mixed_takes_the_images_chosen():
    chosen = next(iter(streams.single(toy(), images=6, subset="random"))).index.tolist()
    index = torch.cat([batch.index for batch in streams.mixed(toy(), NAMES, images=6, subset="random")])
    assert Counter(index.tolist()) == dict.fromkeys(chosen, 3)
    assert chosen != list(range(6))


def test_mixed_really_mixes():
    batches = list(streams.mixed(toy(), NAMES, batch_size=23))
    assert all(set(batch.domains) == set(NAMES) for batch in batches)
    other = list(streams.mixed(toy(), NAMES, batch_size=23, seed=1))
    assert batches[0].domains != other[0].domains


def test_blended_never_ends_and_has_no_length():
    stream = streams.blended(toy(), batch_size=10)
    assert stream.endless
    assert stream.batches is None
    assert stream.domains == []
    with pytest.raises(TypeError, match="endless"):
        len(stream)
    far = next(iter(stream.at(10**9)))
    assert far.position == 10**9
    assert far.x.min() >= 0
    assert far.x.max() <= 1


def test_blended_strengths_drift_and_pairs_hand_over():
    batches = list(islice(streams.blended(toy(), NAMES, drift=1000, batch_size=50, strength=(0.4, 0.9)), 200))
    for a, b in pairwise(batches):
        for name in a.strengths.keys() | b.strengths.keys():
            assert abs(a.strengths.get(name, 0) - b.strengths.get(name, 0)) < 0.1
        assert len(b.strengths) == 2
        if b.domain_changed:
            assert a.domain.split("+")[1] == b.domain.split("+")[0]
    assert sum(b.domain_changed for b in batches) == 9
    peaks = [max(b.strengths.values()) for b in batches]
    assert 0.4 <= max(peaks) <= 0.9
    assert {name for b in batches for name in b.strengths} == set(NAMES)


def test_blended_images_by_hand():
    """The first images, put together from the corruptions themselves."""
    data = toy()
    stream = streams.blended(data, NAMES, drift=40, batch_size=20, shuffle=False, quantize=False, strength=(1, 1))
    batch = next(iter(stream))
    first, second = batch.domain.split("+")
    assert batch.index.tolist() == list(range(20))
    clean, _ = data.batch(range(20))
    seed = int(np.random.Generator(np.random.PCG64([0, 6, 1])).integers(2**31))
    u = torch.arange(20, dtype=torch.float64) / 40 * np.pi / 2
    x = clean
    for name, s in ((first, u.cos() ** 2), (second, u.sin() ** 2)):
        s = s.float()[:, None, None, None]
        corrupted = fake_corrupt(x, name, 5, keys=fake_keys(seed, name, 5, range(20)))
        x = (1 - s) * x + s * corrupted
    torch.testing.assert_close(batch.x, x)


@examples
@given(size=st.integers(1, 40), drift=st.integers(1, 60), seed=st.integers(0, 3))
def test_blended_passes_over_all_images_whatever_the_batch_size(size, drift, seed):
    def first(batch_size):
        batches = list(islice(streams.blended(toy(), NAMES, drift=drift, batch_size=batch_size, seed=seed), 69))
        return torch.cat([batch.x for batch in batches])[:69], torch.cat([batch.index for batch in batches])[:69]

    x, index = first(size)
    for part in index.reshape(3, 23):
        assert sorted(part.tolist()) == list(range(23))
    reference, same_index = first(8)
    assert torch.equal(index, same_index)
    assert torch.equal(x, reference)


def test_blended_draws_anew_in_each_pass():
    images = list(islice(streams.blended(toy(), NAMES, drift=10**6, batch_size=23, shuffle=False), 2))
    assert images[0].index.tolist() == images[1].index.tolist()
    assert (images[0].x - images[1].x).abs().mean() > 0.01


@examples
@given(seed=st.integers(0, 100), size=st.integers(2, 6))
def test_blended_walk_never_repeats_and_visits_all(seed, size):
    walk = [walk_step(seed, size, step) for step in range(size * 6)]
    assert all(a != b for a, b in pairwise(walk))
    for turn in range(6):
        assert sorted(walk[turn * size : (turn + 1) * size]) == list(range(size))
