"""NOTE against its authors' code, whose random choices were made by the same numbers."""

import pytest
import torch
from torch import nn

import petal
from methods.golden import fast, replay, small
from networks import images, network
from petal.errors import ConfigError
from petal.norm import InstanceAwareNorm, instance_aware


@pytest.mark.parametrize("name", ["note_adam", "note_sgd"])         # 20 places, and 7 for 10 classes
def test_note_is_its_authors(name: str) -> None:
    adapter = replay(name, petal.NOTE, tolerance=1e-11)
    assert len(adapter.memory.samples()[0]) == adapter.memory.capacity


def test_images_after_an_update_are_predicted_by_the_network_of_then() -> None:
    model, batches = small()
    x = batches[0, :9]
    options = {"memory": 6, "every": 4, "lr": 0.05, "norm_momentum": 0.3}
    whole, single = petal.NOTE(model, **options), petal.NOTE(model, **options)
    single.generator.set_state(whole.generator.get_state())
    before = whole.state_dict()
    predicted = whole.predict(x)
    assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())
    answer = whole(x)
    assert torch.equal(predicted, answer)
    assert not torch.allclose(answer, petal.NOTE(model, **(options | {"every": 100}))(x), atol=1e-6)
    assert torch.allclose(answer[:4], torch.cat([single(image[None]) for image in x[:4]]), atol=1e-12)
    assert torch.allclose(answer[:4], petal.NOTE(model, **(options | {"every": 100}))(x)[:4], atol=1e-12)


def test_settings_change_what_they_say() -> None:
    model, batches = small()
    usual = {"memory": 8, "every": 12, "lr": 0.02}

    def after(**options: object) -> torch.Tensor:
        adapter = petal.NOTE(model, **(usual | options))
        return torch.stack([adapter(x) for x in batches[:3]])[-1]

    base = after()
    for changed in ({"memory": 6}, {"every": 8}, {"norm_momentum": 0.3}, {"shrink": 1.0}, {"temperature": 2.0},
                    {"epochs": 2}, {"lr": 0.1}, {"steps": 2}, {"episodic": True}, {"seed": 1}):  # fmt: skip
        assert not torch.allclose(base, after(**changed), atol=1e-9), changed
    for wrong in ({"memory": 0}, {"every": 0}, {"epochs": 0}, {"shrink": -1}, {"norm_momentum": 2}, {"temperature": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            petal.NOTE(model, **wrong)


def test_a_network_trained_with_instance_aware_norms_is_taken_as_it_is() -> None:
    model, batches = small()
    trained = instance_aware(model, shrink=2.0)
    trained.train()(batches[0])
    trained.eval()
    adapter = petal.NOTE(trained, shrink=2.0)
    with torch.no_grad():
        assert torch.allclose(adapter.predict(batches[1]), trained(batches[1]), atol=1e-12)
    assert isinstance(adapter.model.bn1, InstanceAwareNorm)


def test_other_networks() -> None:
    for name in ("group-norm", "vit"):
        adapter = petal.NOTE(network(name), memory=6, every=6, lr=0.01)
        first = adapter.predict(images())
        adapter(images())
        assert not torch.equal(adapter.predict(images()), first)
    with pytest.raises(ConfigError, match="NOTE adapts the scale and shift"):
        petal.NOTE(nn.Linear(3, 2))
    vectors = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    adapter = petal.NOTE(vectors, memory=4, every=4)
    assert adapter(torch.rand(9, 4)).shape == (9, 3)
    assert adapter(torch.rand(1, 4)).shape == (1, 3)


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_not_finite_is_not_learned_from(quick: bool) -> None:
    adapter = petal.NOTE(network(), memory=12, every=12)
    adapter = fast(adapter) if quick else adapter
    adapter(images())
    adapter(images(6, seed=1))
    broken = adapter.adapted["norm2.bias"]
    kept = broken.detach().clone()
    before = {key: value.clone() for key, value in adapter.weights().items() if "running" in key}
    with torch.no_grad():
        broken.fill_(float("inf"))
    held = adapter.memory.held()
    adapter(images(6, seed=2))
    assert adapter.skipped == 1
    assert adapter.memory.held() == held                            # no label, no place
    assert all(torch.equal(adapter.weights()[key], value) for key, value in before.items())
    with torch.no_grad():
        broken.copy_(kept)
    assert adapter(images(seed=3)).isfinite().all()


def test_what_goes_around_it() -> None:
    guard = petal.Guard(petal.NOTE(network(), memory=8, every=8), every=2, window=30)
    for seed in range(6):
        guard(images(seed=seed))
    guard.rollback()
    assert guard(images()).isfinite().all()
    with pytest.raises(ConfigError, match="SmallBatch makes no sense around NOTE"):
        petal.SmallBatch(petal.NOTE(network()))
