"""SANTA against runs of the collection's code."""

import pytest
import torch
from torch import nn

import petal
from methods.field import CASES, RATES, close, flat, golden_run, inputs, source_batches
from methods.golden import augment, read, sgd
from petal.errors import ConfigError


@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_santa_is_the_reference(norm: str, optimizer: str) -> None:
    adapter, golden, logits = golden_run("santa", petal.SANTA, norm, optimizer, lr=RATES[optimizer] / 3)
    assert close(logits, golden["logits"])
    assert close(flat(adapter.adapted), torch.cat([golden["weights"], golden["projector"]]))
    quick, _, rough = golden_run("santa", petal.SANTA, norm, optimizer, torch.float32, lr=RATES[optimizer] / 3)
    assert quick.executor is not None
    assert close(rough, golden["logits"], 2e-3)
    assert close(flat(quick.adapted), torch.cat([golden["weights"], golden["projector"]]), 2e-3)


def test_without_projector_and_losses() -> None:
    def after(**options: object) -> torch.Tensor:
        model, batches = inputs()
        statistics = petal.collect_statistics(model, source_batches(read("santa")[0]["labels"]), ["prototypes"])
        adapter = petal.SANTA(model, statistics, 0.01, augment=augment, optimizer=sgd, **options)
        assert ("projector_bias_1" in adapter.adapted) == (options.get("projection") != 0)
        for x in batches:
            adapter(x)
        assert torch.equal(adapter.anchor.bn1.weight, adapter.origin()["bn1.weight"])
        return adapter.model.bn1.weight.detach()

    assert not close(after(projection=0), after(), 1e-6)
    assert not close(after(temperature=1.0), after(), 1e-6)
    still = after(consistency=0, contrast=0)
    assert close(still, inputs()[0].bn1.weight, 1e-12)


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    statistics = petal.collect_statistics(model, source_batches(read("santa")[0]["labels"]), ["prototypes"])
    with pytest.raises(ConfigError, match="this network has none: use RMT"):
        petal.SANTA(model, statistics)
    with pytest.raises(ConfigError, match="contrast must be"):
        petal.SANTA(model, statistics, contrast=-1)
    with pytest.raises(ConfigError, match="consistency must be"):
        petal.SANTA(model, statistics, consistency=-1)
