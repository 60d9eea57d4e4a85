import json
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.fakes import toy
from petal.data import STREAMS, from_arrays, streams
from petal.errors import DataError

from .kinds import ALL, FINITE, NAMES, by_image, examples, same

pytestmark = pytest.mark.usefixtures("fake")


def test_every_stream_is_tested():
    assert {"stretches", "alternating", "interleaved"} == set(ALL) - set(STREAMS)
    assert set(STREAMS) < set(ALL)


@pytest.mark.parametrize("kind", ALL)
@examples
@given(st.data())
def test_resumed_anywhere_is_the_same_stream(kind, data):
    size = data.draw(st.integers(1, 30), "batch_size")
    options = {"batch_size": size, "seed": data.draw(st.integers(0, 3)), "shuffle": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options |= {"images": data.draw(st.integers(1, 5)), "subset": data.draw(st.sampled_from(["first", "random"]))}
    stream = ALL[kind](toy(), **options)
    whole = list(islice(stream, 60))
    assert [batch.position for batch in whole] == list(range(len(whole)))
    position = data.draw(st.integers(0, len(whole)), "position")
    resumed = ALL[kind](toy(), **options, prefetch=data.draw(st.integers(0, 2)), start=position)
    rest = list(islice(resumed, len(whole) - position))
    assert len(rest) == len(whole) - position
    for a, b in zip(whole[position:], rest, strict=True):
        same(a, b)


@pytest.mark.parametrize("kind", FINITE)
@examples
@given(size=st.integers(1, 40))
def test_images_do_not_depend_on_the_batch_size(kind, size):
    reference, other = by_image(FINITE[kind](toy(), batch_size=7)), by_image(FINITE[kind](toy(), batch_size=size))
    assert reference.keys() == other.keys()
    for key, image in reference.items():
        assert torch.equal(image, other[key]), key


@pytest.mark.parametrize("kind", FINITE)
@examples
@given(size=st.integers(1, 40), position=st.integers(0, 6))
def test_length_and_short_last_batches(kind, size, position):
    stream = FINITE[kind](toy(), batch_size=size)
    batches = list(stream)
    assert len(stream) == len(batches) == stream.batches
    assert len(list(stream)) == len(batches)                        # and again from the start
    assert len(stream.at(min(position, len(batches)))) == len(batches) - min(position, len(batches))
    segments = {"single": [23], "continual": [23] * 3, "gradual": [23] * 14, "mixed": [69],
                "recurring": [23] * 6, "own": [23, 5]}.get(kind, [23] * 3)  # fmt: skip
    assert [len(batch) for batch in batches] == [min(size, n - first) for n in segments for first in range(0, n, size)]
    for batch in batches:
        assert len(batch) == len(batch.x) == len(batch.index) == len(batch.domains)
        assert batch.x.dtype == torch.float32
        assert batch.y.dtype == batch.index.dtype == torch.int64


def test_starting_late_makes_nothing_before():
    touched = []

    class Watched(type(toy())):
        def read(self, indices):
            touched.extend(indices.tolist())
            return super().read(indices)

    data = toy()
    data.__class__ = Watched
    stream = streams.recurring(data, NAMES, visits=1000, batch_size=5)
    batch = next(iter(stream.at(len(stream) - 1)))
    assert touched == [20, 21, 22] == batch.index.tolist()
    assert batch.visit == 999


@pytest.mark.parametrize("kind", ALL)
def test_position_goes_through_json(kind):
    stream = ALL[kind](toy(), batch_size=6)
    expected = list(islice(stream, 4))
    running = iter(stream)
    for _ in range(2):
        next(running)
    assert stream.position == 2
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ALL[kind](toy(), batch_size=6)
    resumed.load_state_dict(state)
    for a, b in zip(expected[2:], islice(resumed, 2), strict=False):
        same(a, b)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_position_counts_what_was_handed_out(prefetch):
    stream = streams.single(toy(), batch_size=2, prefetch=prefetch)
    for k, batch in enumerate(stream):
        assert batch.position == k
        assert stream.position == k + 1


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 5}, {"seed": 1}, {"images": 9}, {"shuffle": True}, {"quantize": False}, {"profile": "imagenet"}],
)
def test_a_position_of_another_stream_is_refused(change):
    state = streams.continual(toy(), NAMES, batch_size=6).state_dict()
    other = streams.continual(toy(), NAMES, **{"batch_size": 6, **change})
    with pytest.raises(DataError, match=f"another stream: {next(iter(change))}|another stream: batch"):
        other.load_state_dict(state)
    for stream in (
        streams.continual(toy(), NAMES[::-1], batch_size=6),
        streams.continual(toy(), NAMES, severity=4, batch_size=6),
        streams.continual(toy(seed=1), NAMES, batch_size=6),
        streams.correlated(toy(), NAMES, batch_size=6),
    ):
        with pytest.raises(DataError, match="another stream"):
            stream.load_state_dict(state)
    with pytest.raises(DataError, match="fingerprint; found position"):
        other.load_state_dict({"position": 3})


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_while_loading_reaches_the_reader(prefetch):
    images = torch.zeros(6, 3, 2, 2)
    images[4] = 2
    running = iter(streams.single(from_arrays(images, [0] * 6), batch_size=2, prefetch=prefetch))
    next(running), next(running)
    with pytest.raises(DataError, match=r"in \[0, 1\]"):
        next(running)


def test_batches_need_no_gradient_and_do_not_freeze_the_model():
    batch = next(iter(streams.continual(toy(), NAMES)))
    assert not batch.x.requires_grad
    weight = torch.ones(1, requires_grad=True)
    (batch.x * weight).sum().backward()
    assert weight.grad is not None


def test_random_numbers_of_others_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for kind in ALL:
        list(islice(ALL[kind](toy(), shuffle=True), 3))
    assert torch.equal(torch.rand(3), expected)
