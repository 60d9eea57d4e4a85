"""Attacks as streams: what they send, that it is harmful, and that it is the same every time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import petal
from networks import CLASSES, images, network
from petal.attacks import ATTACKS, Flood, Gate, Invade, Outside, Picture, Poisoned, Repeat, Update, measure
from petal.errors import ConfigError, DataError
from petal.norm import BoundedNorm


def batches(count: int = 3, size: int = 16) -> list[SimpleNamespace]:
    """Images with the labels that the network gives them under batch statistics: it makes no errors."""
    adapter, out = petal.BatchNorm(network()), []
    for seed in range(count):
        x = images(size, seed=seed)
        out.append(SimpleNamespace(x=x, y=adapter(x).argmax(1), position=seed))
    return out


@pytest.mark.parametrize(("share", "counts"), [(0.25, [4, 4, 4]), (0.1, [1, 2, 1]), (0.02, [0, 0, 0]), (1.0, [16] * 3)])
def test_so_many_images_are_his(share: float, counts: list[int]) -> None:
    given = batches()
    for batch, honest, count in zip(Poisoned(given, Picture("white"), share), given, counts, strict=True):
        assert int((~batch.benign).sum()) == count
        assert torch.equal(batch.x[batch.benign], honest.x[batch.benign])
        assert bool((batch.x[~batch.benign] == 1).all())
        assert torch.equal(batch.y, honest.y)


def test_pictures() -> None:
    def sent(kind: str, period: int = 1) -> np.ndarray:
        batch = next(iter(Poisoned(batches(1), Picture(kind, period), 0.1)))
        return batch.x[~batch.benign][0, 0].numpy()

    i, j = np.indices((8, 8))
    assert (sent("stripes") == j % 2).all()
    assert (sent("stripes", 2) == j // 2 % 2).all()
    assert (sent("checkerboard") == (i + j) % 2).all()
    assert (sent("black") == 0).all()


def test_simple_attacks() -> None:
    given = batches()
    for batch, honest in zip(Poisoned(given, Outside(100.0), 0.25), given, strict=True):
        assert torch.equal(batch.x[~batch.benign], 100 * honest.x[~batch.benign])
    sent = torch.cat([batch.x[~batch.benign] for batch in Poisoned(given, Repeat(), 0.25)])
    assert all(torch.equal(x, sent[0]) for x in sent)
    for batch in Poisoned(given, Flood(in_a_row=True), 0.25):
        assert batch.benign.tolist() == [False] * 4 + [True] * 12
    labels = {float(x.sum()): int(y) for b in given for x, y in zip(b.x, b.y, strict=True)}
    flood = [labels[float(x.sum())] for b in Poisoned(given, Flood(), 0.25) for x in b.x[~b.benign]]
    assert len(set(flood)) == 1


@pytest.mark.filterwarnings("ignore:views are made of pixels:petal.PetalWarning")
@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_is_the_same_every_time_and_changes_no_victim(name: str) -> None:
    def run(seed: int = 0) -> list[torch.Tensor]:
        adapter = petal.Petal(network(), **petal.recommended.flagship(petal.Views(flip=0.0)), seed=0)
        out = []
        for batch in Poisoned(batches(2), ATTACKS[name](), 0.25, adapter, seed):
            before = adapter.state_dict()
            out.append(batch.x)
            assert batch.x.shape == (16, 3, 8, 8)
            assert all(torch.equal(v, before[k]) for k, v in adapter.state_dict().items())
            adapter(batch.x)
        return out

    first, again, other = run(), run(), run(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert name in ("none", "bend") or not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def errors(attack: object, make: object = petal.BatchNorm, share: float = 0.25) -> float:
    adapter = make(network())  # type: ignore[operator]
    return petal.evaluate(adapter, Poisoned(batches(), attack, share, adapter)).mean.error  # type: ignore[arg-type]


def test_invading_does_harm_and_knowing_more_does_more() -> None:
    assert errors(ATTACKS["none"]()) == 0.0
    little, free = errors(Invade(eps=16 / 255)), errors(Invade(eps=None))
    assert 0 < little < free
    assert errors(Invade(eps=None, steps=1)) < free
    assert errors(Invade(eps=None, loss="margin", knows="source")) > 0


def test_it_stays_within_its_bounds() -> None:
    given = batches()
    for batch, honest in zip(Poisoned(given, Invade(eps=0.1), 0.25, petal.Tent(network())), given, strict=True):
        assert (batch.x - honest.x).abs().max() <= 0.1 + 1e-6
        assert batch.x.min() >= 0
        assert batch.x.max() <= 1


def test_the_median_is_attacked_by_one_who_knows_it_and_holds_better() -> None:
    def robust(model: torch.nn.Module) -> petal.Adapter:
        return petal.Robust(petal.BatchNorm(model))

    assert 0 < errors(Invade(eps=None), robust) < errors(Invade(eps=None))
    adapter = robust(network())
    list(Poisoned(batches(1), Invade(), 0.25, adapter))
    assert not any(layer.straight for layer in adapter.modules() if isinstance(layer, BoundedNorm))


def test_gate_and_update_do_what_they_say() -> None:
    adapter = petal.CoTTA(network(), views=0)

    def confidence(attack: object) -> float:
        (batch,) = Poisoned(batches(1), attack, 0.25, adapter)  # type: ignore[arg-type]
        with torch.no_grad():
            return float(adapter.source(batch.x).softmax(1).amax(1).mean())

    honest = confidence(ATTACKS["none"]())
    assert confidence(Gate(opens=True)) < honest < confidence(Gate(opens=False))

    def moved(attack: object) -> float:
        victim = petal.Tent(network(), lr=0.1, optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr))
        for batch in Poisoned(batches(1), attack, 0.25, victim):  # type: ignore[arg-type]
            victim(batch.x)
        return float(sum((p.detach() - victim.origin()[n]).square().sum() for n, p in victim.adapted.items()))

    assert moved(Update()) > 1.5 * moved(ATTACKS["none"]())


def test_only_benign_images_are_scored() -> None:
    given = batches(2)
    wrong = [SimpleNamespace(x=b.x, y=(b.y + 1) % CLASSES, position=b.position) for b in given]
    source = petal.BatchNorm(network())
    for batch in Poisoned(given, ATTACKS["none"](), 0.25):
        batch.y[~batch.benign] = (batch.y[~batch.benign] + 1) % CLASSES
        assert petal.evaluate(source, [batch]).mean.n == 12
        assert petal.evaluate(source, [batch]).mean.error == 0.0
    flood = petal.evaluate(source, Poisoned(wrong, Picture("white"), 1.0))
    assert flood.mean.n == 0


def test_measure() -> None:
    stream = petal.streams.single(petal.data.digits("test"), "fog", batch_size=10, images=30)
    model = petal.models.build("small", 10, seed=0)
    seen = []
    found = measure(petal.Source(model), stream, Picture("white"), 0.2, after=2, progress=seen.append)
    plain = petal.evaluate(petal.Source(model), stream)
    assert [record.n for record in found.records] == [8, 8, 8, 10, 10] == [record.n for record in seen]
    assert found.after == pytest.approx(np.mean([record.error for record in plain.records[:2]]))
    assert found.during == pytest.approx(np.mean([record.error for record in found.records[:3]]))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share .* from 0 to 1, got 2"):
        Poisoned([], Repeat(), 2)
    with pytest.raises(ConfigError, match="victim="):
        list(Poisoned(batches(1), Invade(), 0.25))
    with pytest.raises(DataError, match="no tensor with labels"):
        list(Poisoned([torch.rand(4, 3)], Repeat(), 0.25))
    with pytest.raises(ConfigError, match="a picture is one of white"):
        Picture("blue")
    with pytest.raises(ConfigError, match="knows is 'all' or 'source'"):
        Invade(knows="nothing")
