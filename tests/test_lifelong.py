"""A collapse forced on a working network, and long streams on which nothing must happen."""

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

import petal
from petal import Guard, PetalWarning, models
from petal.data import digits, streams
from petal.recipes import recipe
from petal.runs import Experiment, OpenExperiment
from recipes.source import make_source

FEW = ["gaussian_noise", "contrast", "jpeg_compression"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


def opened(source: Path, **settings: object) -> OpenExperiment:
    model = models.build("small", 10, source / "network.safetensors", **recipe("digits").network_options)
    q = petal.DiagonalGaussian.load(source / "posterior.safetensors")
    return OpenExperiment(Experiment("digits", **settings), model, q, digits("test"))


def adapter(o: OpenExperiment, name: str, views: int = 1) -> petal.Adapter:
    return o.adapter(o.experiment.rows([name], [f"petal.views={views}"])[0])


def batches(visits: int) -> Iterator[streams.Batch]:
    return iter(streams.recurring(digits("test"), FEW, visits=visits, images=100, batch_size=25))


def error(a: petal.Adapter) -> float:
    """On the whole stream, without learning."""
    found = [(a.predict(b.x).argmax(1) != b.y).float().mean() for b in batches(1)]
    return float(torch.stack(found).mean())


def fifty_times_faster(a: petal.Adapter) -> None:
    method = a.method if isinstance(a, petal.methods.Wrapper) else a
    assert method.optimizer is not None
    method.lr *= 50
    for group in method.optimizer.param_groups:
        group["lr"] *= 50


@pytest.mark.parametrize("name", ["tent", "petal"])
def test_a_forced_collapse_is_taken_back(name: str, source: Path) -> None:
    """Learning rate times 50: seen within 100 batches, and the error is within a point of that before."""
    b = opened(source)
    bare, guarded = adapter(b, name), adapter(b, f"{name}+guard")
    assert isinstance(guarded, Guard)
    guarded.window, guarded.cooldown = 500, 1000                # the stream is short
    stream = batches(14)                                        # 168 of 25 images
    for batch in islice(stream, 60):
        bare(batch.x)
        guarded(batch.x)
    assert guarded.alarms == []
    before = error(guarded)
    fifty_times_faster(bare)
    fifty_times_faster(guarded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetalWarning)
        for batch in islice(stream, 100):
            bare(batch.x)
            guarded(batch.x)
    assert 60 < guarded.alarms[0].step <= 160
    assert guarded.frozen                                       # it comes to rest at good weights
    assert error(guarded) <= before + 0.01
    assert error(bare) > before + 0.01                          # which is not so by itself


@pytest.mark.parametrize("name", ["tent", "petal"])
def test_nothing_is_seen_in_a_benign_stream(name: str, source: Path) -> None:
    guarded = adapter(opened(source), f"{name}+guard")
    assert isinstance(guarded, Guard)
    guarded.window = 500
    for batch in batches(5):
        guarded(batch.x)
    assert guarded.alarms == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["petal+guard", "petal+small+guard"])
@pytest.mark.parametrize("kind", ["recurring", "correlated"])
def test_no_alarm_in_a_hundred_thousand_images(name: str, kind: str, source: Path) -> None:
    """The demo's stream again and again, and with labels in runs."""
    b = opened(source)
    guarded = adapter(b, name, views=16)
    assert isinstance(guarded, Guard)
    seen = round_ = 0
    while seen < 100_000:
        options = {"visits": 1} if kind == "recurring" else {"concentration": 0.1}
        for batch in streams.STREAMS[kind](digits("test"), batch_size=50, seed=round_, **options):
            guarded(batch.x)
            seen += len(batch)
        round_ += 1
    assert guarded.alarms == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tent", "petal"])
def test_a_forced_collapse_stays_taken_back(name: str, source: Path) -> None:
    """The cause stays for 20,000 images: pauses get longer, and the error over all of them stays near that before."""
    b = opened(source)
    guarded = adapter(b, f"{name}+guard")
    assert isinstance(guarded, Guard)
    stream = batches(100)
    for batch in islice(stream, 200):
        guarded(batch.x)
    before = error(guarded)
    fifty_times_faster(guarded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetalWarning)
        for batch in islice(stream, 800):
            guarded(batch.x)
    assert guarded.alarms
    assert guarded.alarms[0].step <= 300
    assert error(guarded) <= before + 0.01
