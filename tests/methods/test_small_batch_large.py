"""Large batches whose labels come in no order are used as they are by `SmallBatch`, and others are not."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import petal
from methods.trained import images, model
from networks import images as noise
from networks import network
from petal import ConfigError, InputError, SmallBatch
from petal.augment import Views
from petal.recommended import flagship

PLAIN = partial(flagship, Views(flip=0.0))


def made(**options: Any) -> SmallBatch:
    return SmallBatch(petal.Petal(model(), **PLAIN()), **({"memory": 100, "every": 100} | options))


def shuffled(count: int, seed: int = 0) -> Tensor:
    return torch.randint(len(images()[0]), (count,), generator=torch.Generator().manual_seed(seed))


def in_runs(count: int, length: int = 60, seed: int = 0) -> Tensor:
    """Numbers of images, of one class for `length` images, then of another."""
    random, labels = np.random.default_rng(seed), images()[1].numpy()
    classes = np.concatenate([random.permutation(10) for _ in range(count // length // 10 + 1)])
    return torch.from_numpy(np.concatenate([random.choice(np.flatnonzero(labels == c), length) for c in classes])[:count])


def of_one(label: int, count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(label).choice(np.flatnonzero(images()[1].numpy() == label), count))


def wrong(adapter: petal.Adapter, numbers: Tensor, batch: int = 50) -> Tensor:
    """Which answers are wrong, along the stream."""
    x, y = images()
    return torch.cat([adapter(x[part]).argmax(1) != y[part] for part in numbers.split(batch)])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_shuffled_batches_teach_what_they_teach_the_method_alone() -> None:
    """To the bit, from the first one on; the answers are those of the method, which the order does not move."""
    x, _ = images()
    alone, around = petal.Petal(model(), **PLAIN()), made()
    apart = 0
    for part in shuffled(300).split(50):
        logits = alone(x[part])
        apart += int((around(x[part]).argmax(1) != logits.argmax(1)).sum())
        assert torch.equal(around.uncorrected, logits)  # type: ignore[arg-type]
    assert apart < 15
    assert same(around.adapter.state_dict(), alone.state_dict())


def test_said_to_be_shuffled_it_is_the_method() -> None:
    alone, around = petal.Petal(network(), **flagship()), SmallBatch(petal.Petal(network(), **flagship()), shuffled=True)
    x = noise(600)
    around.method.executor = None
    for part in (x[:40], x[40:]):                                   # of any size from `large` on
        assert torch.equal(around(part), alone(part))
    assert torch.equal(around.predict(x[:40]), alone.predict(x[:40]))
    assert same(around.adapter.state_dict(), alone.state_dict())


def test_small_batches_and_runs_are_not_used_as_they_are() -> None:
    for adapter, numbers, batch in ((made(), shuffled(200), 20), (made(), in_runs(200), 50)):
        for part in numbers.split(batch):
            adapter(images()[0][part])
            assert not adapter._behind


def test_runs_begin_and_end() -> None:
    """Within 500 images of each change it is where it would be, had it always been so."""
    parts = [in_runs(700), shuffled(700), in_runs(700, seed=1)]
    adapter = made()
    found = [wrong(adapter, part)[500:].double().mean() for part in parts]
    alone = wrong(petal.Petal(model(), **PLAIN()), parts[1])[500:].double().mean()
    assert found[1] < alone + 0.03
    assert found[0] < 0.5 * alone
    assert found[2] < 0.5 * alone


def test_the_estimates_tell_a_batch_of_one_class() -> None:
    """Which, normalised by itself, would look like a batch of all of them."""
    x, _ = images()
    adapter = made()
    for part in shuffled(150).split(50):
        adapter(x[part])
    before = adapter.state_dict()
    assert adapter._believed(x[shuffled(50, seed=1)], None) > 0.9
    assert adapter._believed(x[of_one(3, 50)], None) < 0.1
    assert adapter._believed(x[in_runs(50, length=15)], None) < 0.1
    assert same(adapter.state_dict(), before)


def test_what_a_look_finds_decides_of_the_next_batch() -> None:
    x, _ = images()
    adapter = made(look=100)
    adapter._believed = lambda x, stream: 1.0 if len(adapter.state_dict().get("small.samples", ())) < 100 else 0.0  # type: ignore[method-assign]
    used = []
    for part in shuffled(300).split(50):
        adapter(x[part])
        used.append(adapter._behind)
    assert used[:2] == [True, True]             # after the second it looks, and doubts
    assert not used[2]
    assert used[3]                              # what came since then is believed


def test_an_image_out_of_proportion_keeps_a_batch_from_being_used() -> None:
    x, _ = images()
    adapter = made(memory=200)
    adapter(x[shuffled(50)])
    assert adapter._behind
    bad = x[shuffled(50, seed=1)].clone()
    bad[7] = 1e4
    before = {key: value.clone() for key, value in adapter.weights().items()}
    adapter(bad)
    assert not adapter._behind
    assert all(torch.equal(value, before[key]) for key, value in adapter.weights().items())


def test_the_state_has_all_of_it() -> None:
    """Also between a batch that was used as it is and one that is not: `predict` says what comes, another goes on."""
    x, _ = images()
    adapter = made(memory=60, every=30, look=100)
    start = adapter.state_dict()
    for number, size in enumerate([50, 50, 50, 7, 50, 1, 40, 50, 50]):
        part = x[shuffled(size, seed=number)]
        before = adapter.state_dict()
        said = adapter.predict(part)
        assert same(adapter.state_dict(), before)
        other = made(memory=60, every=30, look=100)
        other.load_state_dict(before)
        answer = adapter(part)
        assert torch.equal(said, answer)
        assert torch.equal(other(part), answer)
        assert same(other.state_dict(), adapter.state_dict())
    adapter.reset()
    assert same(adapter.state_dict(), start)


def test_every_limit_counts() -> None:
    x, _ = images()

    def used(**options: Any) -> bool:
        adapter = made(**options)
        adapter(x[shuffled(50)])
        return adapter._behind

    assert used()
    assert used(large=50)
    assert not used(large=51)
    assert not used(sure=1.0)
    for option, value in (("large", 0), ("sure", 1.5), ("look", 0)):
        with pytest.raises(ConfigError, match=option):
            made(**{option: value})


def test_sources_are_judged_each_by_itself() -> None:
    x, _ = images()
    adapter = made()
    for part in shuffled(150).split(50):
        adapter(x[part], stream="mixed")
        assert adapter._behind
    for part in in_runs(150, length=50).split(50):
        adapter(x[part], stream="runs")
    assert not adapter._behind
    adapter(x[shuffled(50)], stream="mixed")
    assert adapter._behind
    adapter(x[torch.cat([shuffled(25), in_runs(25)])], stream=["mixed"] * 25 + ["runs"] * 25)
    assert not adapter._behind
    before = adapter.state_dict()
    with pytest.raises(InputError, match="50 images"):
        adapter(x[:50], stream=["mixed"])
    assert same(adapter.state_dict(), before)


def test_what_fails_changes_nothing() -> None:
    x, _ = images()
    adapter = made()
    for part in shuffled(100).split(50):
        adapter(x[part])
    before = adapter.state_dict()
    with pytest.raises(InputError):
        adapter(torch.rand(50, 2, 32, 32))
    assert same(adapter.state_dict(), before)


def test_learning_that_is_off_stays_off() -> None:
    x, _ = images()
    adapter = made()
    start = {key: value.clone() for key, value in adapter.weights().items()}
    for part in shuffled(100).split(50):
        adapter.observe(x[part])
        assert adapter._behind
    assert all(torch.equal(value, start[key]) for key, value in adapter.weights().items())
    assert len(adapter.state_dict()["small.samples"]) == 100


def test_a_guard_sees_what_it_sees_around_the_method() -> None:
    x, _ = images()
    alone, around = (petal.Guard(a, every=2) for a in (petal.Petal(model(), **PLAIN()), made(shuffled=True)))
    for part in shuffled(200).split(50):
        alone(x[part]), around(x[part])
    assert alone.status() == around.status()


def test_ranks_do_what_the_first_one_decides() -> None:
    class Decided:
        def decided(self, needed: Tensor) -> Tensor:
            return torch.zeros_like(needed)

    adapter = made()
    adapter.method.sharing = Decided()  # type: ignore[assignment]
    adapter(images()[0][shuffled(50)])
    assert not adapter._behind


def test_samples_of_another_shape_begin_the_memory_anew() -> None:
    adapter = SmallBatch(petal.Tent(network()), memory=12, every=12)
    adapter(noise(6))
    assert adapter(torch.rand(4, 3, 9, 9)).shape == (4, 5)
    assert list(adapter.state_dict()["small.samples"].shape) == [4, 3, 9, 9]
    assert adapter.logits_with(adapter.origin(), noise(6)).shape == (6, 5)


def test_one_line_for_all() -> None:
    for size in (1, 3, 50):
        assert petal.adapt(network(), engine="eager")(noise(size)).shape == (size, 5)
    assert petal.adapt(network(), engine="eager").kind == "Guard(SmallBatch(Petal))"
    assert petal.adapt(network(), engine="eager", shuffled=True).adapter.prior is None
    assert petal.adapt(network(), engine="eager", memory=50).adapter.memory == 50
    assert petal.adapt(network(), engine="eager", memory=0).kind == "Guard(Petal)"
    whole = petal.adapt(network(), engine="eager", statistics="median", outliers="aside")
    assert whole.kind == "Guard(Screen(SmallBatch(Robust(Petal))))"
    for size in (1, 50):
        assert whole(noise(size)).shape == (size, 5)
