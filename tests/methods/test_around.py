"""What goes around a method keeps the promises of a method."""

from contextlib import suppress
from typing import Any

import pytest
import torch

import petal
from petal.checks import Factory, NotApplicable, check_method
from petal.runs.experiment import Experiment, OpenExperiment

CERTAIN = {"margin": 1.0, "similarity": 1.0}        # every sample counts


def asr(adapter: petal.Adapter) -> petal.Adapter:
    """One that resets now and then, and never everything."""
    return petal.ASR(adapter, level=0.6, keep=1.0, slope=0.2)


def reservoir(adapter: petal.Adapter) -> petal.Adapter:
    """One that opens every domain that it may."""
    return petal.Reservoir(adapter, threshold=0.05, capacity=3, buffer=12)


def small(adapter: petal.Adapter) -> petal.Adapter:
    return petal.SmallBatch(adapter, memory=12, every=12)


def guard(adapter: petal.Adapter) -> petal.Adapter:
    return petal.Guard(adapter, every=5, window=60)


FACTORIES = {
    "eata+asr": Factory(petal.EATA, around=[asr], **CERTAIN),
    "roid+asr+small+guard": Factory(petal.ROID, around=[asr, small, guard], augment=lambda x: 0.9 * x),
    "eta+reservoir": Factory(petal.ETA, around=[reservoir], **CERTAIN),
    "rdumb+reservoir+guard": Factory(petal.RDumb, around=[reservoir, guard], every=3, **CERTAIN),
}
NETWORKS = {"eata+asr": ("batch-norm", "vit"), "eta+reservoir": ("batch-norm", "group-norm")}
CHECKS = [
    pytest.param(check, id=f"{name}: {check}")
    for name, factory in FACTORIES.items()
    for check in check_method(factory, networks=NETWORKS.get(name, ("batch-norm",)))
]


@pytest.mark.parametrize("check", CHECKS)
def test_it_does_what_every_method_does(check: Any) -> None:
    with suppress(NotApplicable):
        check()


def test_the_styles_of_an_experiment_reach_the_reservoir() -> None:
    model = petal.checks.network()
    known = petal.collect_statistics(model, [petal.checks.images(seed=seed) for seed in range(4)], ["styles"])
    opened = OpenExperiment(Experiment("digits"), model, statistics=known)
    (row,) = opened.experiment.rows(["tent+reservoir"], ["reservoir.capacity=5", "reservoir.quantile=0.5"])
    adapter = opened.plain_adapter(row)
    assert torch.equal(adapter.known, known.styles)
    assert (adapter.capacity, adapter.describe()["reservoir"]) == (5, "1 of up to 5 domains; threshold: the source's")


def test_small_batches_go_around_asr_and_not_around_a_reservoir() -> None:
    model = petal.checks.network()
    assert small(asr(petal.ETA(model))).kind == "SmallBatch(ASR(ETA))"
    with pytest.raises(petal.ConfigError, match="swap the two"):
        small(reservoir(petal.ETA(model)))
