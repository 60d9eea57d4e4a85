"""RoTTA against its authors' code, and against the collection's where the network has no batch norm."""

import copy

import pytest
import torch

import petal
from methods.golden import augment, fast, replay, small
from networks import images, network
from petal.errors import ConfigError, InputError


@pytest.mark.parametrize("name", ["rotta_adam", "rotta_sgd", "rotta_group"])     # with 20, 7 (fewer than classes), 16 places
def test_rotta_is_its_authors(name: str) -> None:
    adapter = replay(name, petal.RoTTA, augment=augment)
    assert adapter.skipped == 0


def test_batches_of_one_are_the_same_stream() -> None:
    model, batches = small()
    options = {"memory": 8, "every": 7, "lr": 0.01, "augment": augment}
    whole, single = petal.RoTTA(model, **options), petal.RoTTA(model, **options)
    for x in batches[0, :21].split(7):
        assert torch.allclose(whole(x), torch.cat([single(image[None]) for image in x]), atol=1e-12)
    assert torch.equal(whole.memory.samples()[0], single.memory.samples()[0])


def test_settings_change_what_they_say() -> None:
    model, batches = small()
    usual = {"memory": 12, "every": 12, "lr": 0.01, "augment": augment}

    def after(**options: object) -> torch.Tensor:
        adapter = petal.RoTTA(model, **(usual | options))
        return torch.stack([adapter(x) for x in batches[:3]])[-1]

    base = after()
    for changed in ({"memory": 9}, {"every": 8}, {"ema": 0.5}, {"norm_momentum": 0.3}, {"timeliness": 0.0},
                    {"uncertainty": 0.0}, {"augment": petal.Views()}, {"lr": 0.1}, {"steps": 2},
                    {"episodic": True}):  # fmt: skip
        assert not torch.allclose(base, after(**changed), atol=1e-9), changed
    for wrong in ({"memory": 0}, {"every": 0}, {"ema": 1.5}, {"norm_momentum": -1}, {"timeliness": -1},
                  {"uncertainty": "x"}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            petal.RoTTA(model, **wrong)


def test_what_is_not_finite_is_not_learned_from() -> None:
    adapter = petal.RoTTA(network(), memory=12, every=12, augment=augment)
    adapter(images())
    before = {key: value.clone() for key, value in adapter.weights().items()}
    broken = adapter.adapted["norm2.bias"]
    kept = broken.detach().clone()
    broken.data.fill_(float("inf"))
    logits = adapter(images(seed=1))
    assert logits.isfinite().all()                                  # the teacher's
    assert adapter.skipped == 1
    broken.data.copy_(kept)
    for key, value in adapter.weights().items():                    # neither weights nor statistics
        assert torch.equal(value, before[key]), key
    adapter(images(seed=2))
    assert not torch.equal(adapter.weights()["model.norm1.running_mean"], before["model.norm1.running_mean"])


def test_another_size_of_images_is_refused_and_changes_nothing() -> None:
    adapter = petal.RoTTA(network(), memory=4, every=100)
    adapter(images(5))
    before = adapter.state_dict()
    with pytest.raises(InputError, match=r"memory holds samples of \[3, 8, 8\]"):
        adapter(torch.rand(2, 3, 12, 12))
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())


@pytest.mark.parametrize("quick", [False, True])
def test_state_goes_on_exactly_in_the_middle_of_a_memory(quick: bool) -> None:
    def made() -> petal.Adapter:
        adapter = petal.RoTTA(network(), memory=7, every=5)
        return fast(adapter) if quick else adapter

    adapter, other = made(), made()
    for seed in range(3):
        adapter(images(4, seed=seed))
    state = copy.deepcopy(adapter.state_dict())
    predicted = adapter.predict(images(4, seed=9))
    assert all(torch.equal(value, state[key]) for key, value in adapter.state_dict().items())
    other.load_state_dict(state)
    for seed in range(9, 12):
        answer = adapter(images(4, seed=seed))
        assert torch.equal(answer, other(images(4, seed=seed)))
        if seed == 9:
            assert torch.equal(answer, predicted)
    adapter.reset()
    fresh = made().state_dict()
    assert all(torch.equal(value, fresh[key]) for key, value in adapter.state_dict().items())
    assert adapter.state_dict().keys() == fresh.keys()


def test_what_goes_around_it() -> None:
    guard = petal.Guard(petal.RoTTA(network(), memory=8, every=8), every=2, window=30)
    for seed in range(8):
        guard(images(seed=seed))
    guard.rollback()
    assert torch.isfinite(guard(images()).sum())
    with pytest.raises(ConfigError, match="SmallBatch makes no sense around RoTTA: it keeps a memory of its own"):
        petal.SmallBatch(petal.RoTTA(network()))
