import inspect

import pytest
import torch

from data.fakes import fake_corrupt, fake_keys, toy
from petal.data import CorruptedDataset, from_arrays, order, streams
from petal.data.streams import Options, StreamBuilder
from petal.errors import DataError

from .kinds import NAMES

pytestmark = pytest.mark.usefixtures("fake")


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
        (lambda: streams.continual(toy(), NAMES, images=24), "asked for 24 images per domain; toy has 23"),
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


def test_options_are_those_of_the_builder():
    parameters = inspect.signature(StreamBuilder).parameters
    assert list(parameters)[1:] == list(Options.__annotations__)


def test_a_stream_of_ones_own_as_the_docstring_says():
    def backwards(data, order=None, *, severity=5, **options):
        builder = StreamBuilder(data, **options)
        segments = [builder.segment(name, severity) for name in reversed(builder.names(order))]
        return builder.stream("backwards", segments, severity=severity)

    assert [b.domain for b in backwards(toy(), NAMES)] == NAMES[::-1]
    code = inspect.getsource(backwards).replace("    def", "def", 1)
    assert "".join(code.split()) in "".join(streams.__doc__.split())


def test_the_earlier_name_of_the_builder_still_works():
    with pytest.warns(DeprecationWarning, match="StreamBuilder"):
        assert streams.Setup is StreamBuilder
    with pytest.raises(AttributeError, match="nothing"):
        _ = streams.nothing
