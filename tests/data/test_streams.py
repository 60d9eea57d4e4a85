import inspect
import json
import threading
import time
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from petal.data import STREAMS, CorruptedDataset, Segment, Stream, from_arrays, order, streams
from petal.data.streams import Loaded, Options, Setup, correlated_order, gradual_pairs
from petal.errors import DataError

from .fakes import fake_corrupt, fake_keys, toy

pytestmark = pytest.mark.usefixtures("fake")
examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = ["fog", "snow", "frost"]
OTHER = from_arrays(torch.rand(5, 3, 4, 4), [0, 1, 0, 1, 1], name="other")
FINITE = {
    "single": lambda data, **o: streams.single(data, "fog", **o),
    "continual": lambda data, **o: streams.continual(data, NAMES, **o),
    "gradual": lambda data, **o: streams.gradual(data, NAMES[:2], **o),
    "mixed": lambda data, **o: streams.mixed(data, NAMES, **o),
    "correlated": lambda data, **o: streams.correlated(data, NAMES, **o),
    "recurring": lambda data, **o: streams.recurring(data, NAMES, visits=2, **o),
    "own": lambda data, **o: streams.own([("a", data), ("b", OTHER)], **o),
}
ALL = {**FINITE, "blended": lambda data, **o: streams.blended(data, NAMES, drift=17, **o)}


def same(a, b):
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert torch.equal(a.index, b.index)
    for name in ("domain", "severity", "position", "domain_changed", "visit", "domains", "strengths"):
        assert getattr(a, name) == getattr(b, name), name


def by_image(stream):
    """{(domain, severity, visit, index): image}; an image that comes again must be the same again."""
    images = {}
    for batch in stream:
        for k, domain in enumerate(batch.domains):
            key = (domain, batch.severity, batch.visit, int(batch.index[k]))
            assert torch.equal(images.setdefault(key, batch.x[k]), batch.x[k])
    return images


def test_every_stream_is_tested():
    assert set(ALL) == set(STREAMS)


# -- what all streams promise ------------------------------------------------------------------------------------------


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
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        ends = following is None or following.domain_changed or following.visit != batch.visit
        assert len(batch) <= size
        assert len(batch) == size or ends or kind == "recurring"
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


def test_prefetch_changes_nothing_and_stops():
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("petal-prefetch")]

    plain = list(streams.continual(toy(), NAMES, batch_size=4))
    for depth in (1, 2, 50):
        ahead = list(streams.continual(toy(), NAMES, batch_size=4, prefetch=depth))
        assert len(plain) == len(ahead)
        for a, b in zip(plain, ahead, strict=True):
            same(a, b)
    running = iter(streams.blended(toy(), NAMES, batch_size=4, prefetch=2))
    next(running)
    assert workers()
    running.close()
    deadline = time.time() + 10
    while workers() and time.time() < deadline:
        time.sleep(0.01)
    assert not workers()


def test_prefetch_works_ahead_but_not_further():
    made = []
    segment = Segment("d", 0, 10, lambda: torch.arange(10), lambda i, o: made.append(o) or Loaded(i[:, None], i, i))
    running = iter(Stream([segment], batch_size=1, prefetch=2))
    next(running)
    deadline = time.time() + 10
    while len(made) < 3 and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    running.close()


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


# -- corruption on the fly ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [True, False])
def test_images_are_corrupted_by_seed_name_severity_and_index(quantize):
    data = toy()
    stream = streams.gradual(data, NAMES[:2], seed=3, images=7, subset="random", quantize=quantize, batch_size=4)
    for batch in stream:
        clean, labels = data.batch(batch.index)
        keys = fake_keys(3, batch.domain, batch.severity, batch.index)
        assert torch.equal(batch.x, fake_corrupt(clean, batch.domain, batch.severity, quantize=quantize, keys=keys))
        assert torch.equal(batch.y, labels)


def test_quantized_by_default_as_the_published_files():
    x = next(iter(streams.continual(toy(), NAMES))).x * 255
    assert torch.allclose(x, x.round(), atol=1e-3)


def test_profile_is_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "petal.corruptions.corrupt", lambda x, name, severity, profile, **_: seen.append((name, severity, profile)) or x
    )
    next(iter(streams.single(toy(), "fog", severity=2, profile="imagenet")))
    assert seen == [("fog", 2, "imagenet")]


def test_clean_is_a_domain_too():
    data = toy()
    (batch,) = streams.single(data)
    assert (batch.domain, batch.severity) == ("clean", 0)
    assert torch.equal(batch.x, data.batch(range(23))[0])
    assert streams.continual(data, ["fog", "clean"]).domains == [("fog", 5), ("clean", 0)]
    assert {d for b in streams.mixed(data, ["fog", "clean"]) for d in b.domains} == {"fog", "clean"}


class Native(CorruptedDataset):
    """Corrupted images of its own: every pixel says which corruption and severity."""

    name, classes, default_order = "native", None, "imagenet-3dcc"
    names = order("imagenet-3dcc", 1)
    labels = torch.arange(6) % 3

    def __len__(self):
        return 6

    def corrupted(self, name, severity):
        value = (self.names.index(name) * 5 + severity) / 100
        return from_arrays(torch.full((6, 3, 2, 2), value), self.labels)


def test_data_with_its_own_corruptions():
    stream = streams.continual(Native(), batch_size=4)
    assert [name for name, _ in stream.domains] == list(order("imagenet-3dcc", 1))
    for batch in streams.mixed(Native(), ["flash", "fog_3d"], severity=3, batch_size=5):
        values = [(Native.names.index(name) * 5 + 3) / 100 for name in batch.domains]
        assert torch.allclose(batch.x[:, 0, 0, 0], torch.tensor(values))
        assert torch.equal(batch.y, batch.index % 3)
    with pytest.raises(DataError, match="needs clean ones"):
        streams.blended(Native(), ["flash", "fog_3d"])
    with pytest.raises(DataError, match="no clean images"):
        streams.single(Native())


# -- each stream -------------------------------------------------------------------------------------------------------


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


# -- blended -----------------------------------------------------------------------------------------------------------


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
    walk = [streams._walk(seed, size, step) for step in range(size * 6)]
    assert all(a != b for a, b in pairwise(walk))
    for turn in range(6):
        assert sorted(walk[turn * size : (turn + 1) * size]) == list(range(size))


# -- choosing images ---------------------------------------------------------------------------------------------------


def test_images_are_the_first_or_a_seeded_choice():
    def indices(**options):
        return [batch.index.tolist() for batch in streams.continual(toy(), NAMES, images=6, **options)]

    assert indices() == [list(range(6))] * 3
    chosen = indices(subset="random")
    assert chosen[0] == chosen[1] == chosen[2] == sorted(chosen[0])
    assert chosen[0] != list(range(6))
    assert len(set(chosen[0])) == 6
    assert indices(subset="random", seed=1) != chosen
    assert indices(subset="random") == chosen
    shuffled = indices(shuffle=True)
    assert all(sorted(one) == list(range(6)) for one in shuffled)
    assert len({tuple(one) for one in shuffled}) == 3


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: streams.continual(toy(), ["fogg"]), "no corruption is called 'fogg'; there are gaussian_noise"),
        (lambda: streams.continual(toy(), "imagenet-c:11"), "orders 1..10"),
        (lambda: streams.continual(toy(), []), "empty"),
        (lambda: streams.continual(toy(), NAMES, severity=0), "1 to 5; got 0"),
        (lambda: streams.continual(toy(), NAMES, severity=6), "1 to 5; got 6"),
        (lambda: streams.continual(toy(), NAMES, batch_size=0), "batch_size must be"),
        (lambda: streams.continual(toy(), NAMES, batch_size=2.5), "batch_size must be"),
        (lambda: streams.continual(toy(), NAMES, images=0), "images must be"),
        (lambda: streams.continual(toy(), NAMES, images=24), "asked for 24 images a domain; toy has 23"),
        (lambda: streams.continual(toy(), NAMES, subset="last"), "'first' or 'random'"),
        (lambda: streams.continual(toy(), NAMES, profile="mnist"), "'cifar' or 'imagenet'"),
        (lambda: streams.continual(toy(), NAMES, seed=-1), "seed must be"),
        (lambda: streams.continual(toy(), NAMES, prefetch=-1), "prefetch must be"),
        (lambda: streams.continual(toy(), NAMES, start=4), "has 3 batches; it cannot start at 4"),
        (lambda: streams.continual(toy(), NAMES).at(-1), "position must be"),
        (lambda: streams.continual(toy(0), NAMES), "no images"),
        (lambda: streams.recurring(toy(), NAMES, visits=0), "visits must be"),
        (lambda: streams.correlated(toy(), NAMES, concentration=0), "above 0"),
        (lambda: streams.correlated(toy(), NAMES, concentration=float("nan")), "above 0"),
        (lambda: streams.correlated(toy(), NAMES, slots=0), "slots must be"),
        (lambda: streams.mixed(toy(), ["fog", "fog"]), "repeats"),
        (lambda: streams.blended(toy(), ["fog"]), "at least 2"),
        (lambda: streams.blended(toy(), ["fog", "snow", "fog"]), "repeats"),
        (lambda: streams.blended(toy(), ["fog", "clean"]), "no corruption is called 'clean'"),
        (lambda: streams.blended(toy(), NAMES, strength=(0.5, 1.5)), "within 0..1"),
        (lambda: streams.blended(toy(), NAMES, drift=0), "drift must be"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(DataError) as caught:
        call()
    assert message in str(caught.value)


def test_unknown_options_are_not_ignored():
    with pytest.raises(TypeError, match="batchsize"):
        streams.continual(toy(), NAMES, batchsize=3)


def test_options_are_those_of_setup():
    parameters = inspect.signature(Setup).parameters
    assert list(parameters)[1:] == list(Options.__annotations__)


def test_a_stream_of_ones_own_as_the_docstring_says():
    def backwards(data, order=None, *, severity=5, **options):
        setup = Setup(data, **options)
        segments = [setup.segment(name, severity) for name in reversed(setup.names(order))]
        return setup.stream("backwards", segments, severity=severity)

    assert [b.domain for b in backwards(toy(), NAMES)] == NAMES[::-1]
    code = inspect.getsource(backwards).replace("    def", "def", 1)
    assert "".join(code.split()) in "".join(streams.__doc__.split())
