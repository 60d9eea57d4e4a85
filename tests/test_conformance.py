"""Every method passes the checks of `petal.checks`, on every network for which they have a meaning, and a few tests more."""

import pytest
import torch
from torch import nn

import petal
from networks import images, network
from petal.checks import Check, Factory, NotApplicable, check_method
from petal.recommended import flagship


def asr(adapter: petal.Adapter) -> petal.Adapter:
    """One that never resets everything."""
    return petal.ASR(adapter, level=0.6, keep=1.0, slope=0.2)


def large(adapter: petal.Adapter) -> petal.Adapter:
    """One that uses every batch as it is, as if it were large and in no order."""
    return petal.SmallBatch(adapter, memory=12, large=2, sure=0.0)


def clipped(adapter: petal.Adapter) -> petal.Adapter:
    """Steps that have a limit, and statistics of each image too."""
    return petal.Robust(adapter, "clipped", step=1e-3)


def refusing(adapter: petal.Adapter) -> petal.Adapter:
    """A screen that refuses NaN, as the checks demand."""
    return petal.Screen(adapter, "refuse")


FACTORIES = {name: Factory(method) for name, method in petal.METHODS.items()} | {
    "flagship": Factory(petal.Petal, **(flagship() | {"warmup": 3})),
    "flagship, tempered": Factory(petal.Petal, **(flagship() | {          # with all that it can have besides
        "answer": "teacher+samples", "calibrate": "teacher+student-view", "prior_weight": 1e-4, "samples": 2})),
    "petal+guard": Factory(petal.Petal, [petal.Guard]),
    "eta+asr": Factory(petal.ETA, [asr], similarity=1.0),
    "eta+reservoir": Factory(petal.ETA, [petal.Reservoir]),
    "tent+order": Factory(petal.Tent, [petal.Ordered]),
    "tent+small": Factory(petal.Tent, [petal.SmallBatch]),
    "tent+small, as they are": Factory(petal.Tent, [large]),
    "flagship+small": Factory(petal.Petal, [petal.SmallBatch], **(flagship() | {"warmup": 3})),
    "petal+small+guard": Factory(petal.Petal, [petal.SmallBatch, petal.Guard]),
    "tent+robust+screen": Factory(petal.Tent, [clipped, refusing]),
    "flagship+robust+screen+guard": Factory(petal.Petal, [petal.Robust, refusing, petal.Guard],
                                            **(flagship() | {"warmup": 3})),
}
CHECKS = [pytest.param(check, id=f"{name}: {check}") for name in FACTORIES for check in check_method(FACTORIES[name])]
ALONE = {"source", "lame", "rotta", "note", "petta", "memo"}       # by running statistics: one value a channel is enough


@pytest.mark.parametrize("check", CHECKS)
def test_every_method_passes(check: Check) -> None:
    try:
        check()
    except NotApplicable:
        return


def run(adapter: petal.Adapter, first: int, count: int) -> list[torch.Tensor]:
    return [adapter(images(seed=seed)) for seed in range(first, first + count)]


@pytest.mark.filterwarnings("ignore:a batch of one sample:petal.PetalWarning")
@pytest.mark.parametrize("method", [name for name in petal.METHODS if name not in ALONE])
def test_one_value_a_channel_is_refused_with_advice(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    given = {}
    if "statistics" in FACTORIES[method].parameters:
        given["statistics"] = petal.collect_statistics(model, [torch.rand(24, 4) for _ in range(2)], labels="predicted")
    adapter = FACTORIES[method](model, views=0, augment=lambda x: 0.9 * x, destroy=lambda x: 0.9 * x, **given)
    adapter(torch.rand(8, 4))
    before = adapter.state_dict()
    with pytest.raises(petal.InputError, match=r"batch norm '1' sees one value a channel.*two images or more"):
        adapter(torch.rand(1, 4))
    after = adapter.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("net", ["group-norm", "vit"])
def test_bn_without_batch_norm_says_what_to_use(net: str) -> None:
    with pytest.raises(petal.ConfigError, match="use Tent, CoTTA or Petal"):
        petal.BatchNorm(network(net))


@pytest.mark.parametrize("method", [petal.Tent, petal.PseudoLabel])
def test_affine_methods_need_normalisation(method: type[petal.Tent]) -> None:
    with pytest.raises(petal.ConfigError, match="use CoTTA or Petal"):
        method(nn.Linear(3, 2))


def test_teacher_methods_adapt_every_parameter_whatever_its_name() -> None:
    adapter = FACTORIES["petal"](network("vit"))
    before = {k: v.clone() for k, v in adapter.model.named_parameters()}
    assert {"cls_token", "attention.in_proj_weight"} <= before.keys()
    run(adapter, 0, 2)
    assert all(not torch.equal(v, before[k]) for k, v in adapter.model.named_parameters())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_kind_of_batch_norm(layer: type[nn.Module]) -> None:
    kinds = {nn.BatchNorm1d: (nn.Conv1d, 3), nn.BatchNorm3d: (nn.Conv3d, 5)}
    conv, rank = kinds.get(layer, (nn.Conv2d, 4))
    model = nn.Sequential(conv(3, 4, 3), layer(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    x = torch.rand(6, 3, *[5] * (rank - 2))
    model(x)
    shifted = x * 3 + 1
    normalised = petal.BatchNorm(model)
    assert torch.allclose(normalised(x), normalised(shifted), atol=1e-3)  # batch statistics undo scale and shift
    assert not torch.allclose(petal.Source(model)(x), petal.Source(model)(shifted), atol=1e-3)
    petal.CoTTA(model, views=2, confidence=2, augment=lambda x: x.flip(-1))(x)


def test_a_generator_serves_as_seed() -> None:
    by_seed = FACTORIES["petal"](network(), seed=5)
    by_generator = FACTORIES["petal"](network(), seed=torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(run(by_seed, 0, 3), run(by_generator, 0, 3), strict=True))
    other = FACTORIES["petal"](network(), seed=6)
    assert not all(torch.equal(a, b) for a, b in zip(run(by_seed, 0, 3), run(other, 0, 3), strict=True))
