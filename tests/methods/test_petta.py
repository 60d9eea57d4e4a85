"""PeTTA against its authors' code."""

import pytest
import torch

import petal
from methods.golden import augment, fast, read, replay, small
from networks import CLASSES, images, network
from petal.errors import ConfigError, StatisticsError


def statistics(name: str = "petta_adam") -> petal.SourceStatistics:
    tensors, _ = read(name)
    return petal.SourceStatistics(
        prototypes=tensors["prototypes"], variances=tensors["variances"], counts=tensors["counts"]
    )


def of_network(name: str = "batch-norm") -> petal.SourceStatistics:
    batches = [(images(64, seed=s), None) for s in range(3)]
    return petal.collect_statistics(network(name), batches, ["prototypes"], labels="predicted", batch_statistics=False)


@pytest.mark.parametrize("name", ["petta_adam", "petta_sgd", "petta_fixed"])
def test_petta_is_its_authors(name: str) -> None:
    adapter = replay(name, petal.PeTTA, statistics(name), augment=augment)
    assert (adapter.prototypes - read(name)[0]["moved"]).abs().max() < 1e-12


def test_settings_change_what_they_say() -> None:
    model, batches = small()
    usual = {"memory": 12, "lr": 0.01, "ema": 0.9, "augment": augment}

    def after(**options: object) -> torch.Tensor:
        adapter = petal.PeTTA(model, statistics(), **(usual | options))
        return torch.stack([adapter(x) for x in batches[:3]])[-1]

    base = after()
    for changed in ({"memory": 9}, {"ema": 0.5}, {"norm_momentum": 0.3}, {"timeliness": 0.0}, {"uncertainty": 0.0},
                    {"pull": 100.0},
                    {"regularizer": "l2"}, {"regularizer": "none"}, {"anchor": 0.0}, {"loss": "cross-entropy"},
                    {"prototype_momentum": 0.5}, {"adaptive_pull": False}, {"adaptive_ema": False},
                    {"augment": petal.Views()}, {"lr": 0.1}, {"steps": 2}, {"episodic": True}):  # fmt: skip
        assert not torch.allclose(base, after(**changed), atol=1e-9), changed
    for wrong in ({"memory": 0}, {"ema": 2}, {"norm_momentum": -1}, {"pull": -1}, {"anchor": -1}, {"regularizer": "L2"},
                  {"loss": "ce"}, {"prototype_momentum": 2}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            petal.PeTTA(model, statistics(), **wrong)
    with pytest.raises(StatisticsError, match="no prototypes"):
        petal.PeTTA(model, petal.SourceStatistics(fisher={"bn1.weight": torch.ones(6)}))
    with pytest.raises(StatisticsError, match="do not fit"):
        petal.PeTTA(network(), statistics())


def test_the_divergence_is_the_papers() -> None:
    mean = torch.tensor([[0.0, 0], [1, 1], [2, 2], [0, 0], [0, 0]])
    known = petal.SourceStatistics(
        prototypes=mean.repeat(1, 6), variances=torch.full((5, 12), 2.0), counts=torch.tensor([5, 5, 5, 1, 0])
    )
    adapter = petal.PeTTA(network(), known, prototype_momentum=0.75)
    adapter.prototypes = known.prototypes + torch.tensor([1.0, 2, 3, 4, 5])[:, None]
    before = adapter.prototypes.clone()
    labels = torch.tensor([0, 2, 2, 3, 4])
    features = torch.arange(5.0)[:, None].expand(5, 12)
    gamma = adapter.divergence(features, torch.nn.functional.one_hot(labels, CLASSES) * 9.0)
    expected = 1 - torch.exp(torch.tensor(-(1.0 + 9.0) / 2 / (2 + 1e-6)))      # of classes 0 and 2: 3 and 4 have no variance
    assert float(gamma) == pytest.approx(float(expected), abs=1e-6)
    for label, now in ((0, 0.0), (2, 1.5), (3, 3.0), (4, 4.0)):
        assert torch.allclose(adapter.prototypes[label], 0.75 * before[label] + 0.25 * now)
    assert torch.equal(adapter.prototypes[1], before[1])
    broken = features.clone()
    broken[0] = float("nan")
    adapter.divergence(broken, torch.nn.functional.one_hot(labels, CLASSES) * 9.0)
    assert adapter.prototypes.isfinite().all()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", ["batch-norm", "group-norm", "vit"])
def test_other_networks_and_batches_of_one(name: str, quick: bool) -> None:
    adapter = petal.PeTTA(network(name), of_network(name), memory=5, lr=0.01)
    adapter = fast(adapter) if quick else adapter
    first = adapter.predict(images())
    for image in images(7, seed=3):
        assert adapter(image[None]).isfinite().all()
    assert len(adapter.memory.samples()[0]) <= 5
    assert not torch.equal(adapter.predict(images()), first)
    adapter.reset()
    assert torch.equal(adapter.predict(images()), first)


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_not_finite_is_not_learned_from(quick: bool) -> None:
    adapter = petal.PeTTA(network(), of_network(), memory=12, augment=augment)
    adapter = fast(adapter) if quick else adapter
    adapter(images())
    before = {key: value.clone() for key, value in adapter.weights().items()}
    broken = adapter.adapted["norm2.bias"]
    kept = broken.detach().clone()
    with torch.no_grad():
        broken.fill_(float("inf"))
    assert adapter(images(seed=1)).isfinite().all()                 # the teacher's
    assert adapter.skipped == 1
    with torch.no_grad():
        broken.copy_(kept)
    assert all(torch.equal(value, before[key]) for key, value in adapter.weights().items())


def test_what_goes_around_it() -> None:
    guard = petal.Guard(petal.PeTTA(network(), of_network(), memory=8), every=2, window=30)
    for seed in range(6):
        guard(images(seed=seed))
    guard.rollback()
    assert guard(images()).isfinite().all()
    with pytest.raises(ConfigError, match="SmallBatch makes no sense around PeTTA"):
        petal.SmallBatch(petal.PeTTA(network(), of_network()))
