"""RMT against runs of the collection's code, with and without source data."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import CASES, RATES, close, flat, golden_run, inputs, set_projector, source_batches
from methods.golden import OPTIMIZERS, augment, read, sgd
from networks import network, statistics
from petal.engine import Policy
from petal.errors import ConfigError, StatisticsError
from petal.methods.self_training import SourceBatches


def parts(adapter: petal.Adapter) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, projector and some of the teacher, as the golden files have them."""
    own = {name: value for name, value in adapter.adapted.items() if not name.startswith("projector")}
    teacher = dict(adapter.teacher.named_parameters())
    return flat(own), flat(adapter.against.parameters), flat({name: teacher[name] for name in ("fc.bias", "bn2.weight")})


WITH_DATA = [("batch", optimizer, True) for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("norm", "optimizer", "data"), [*((*case, False) for case in CASES), *WITH_DATA])
def test_rmt_is_the_reference(norm: str, optimizer: str, data: bool) -> None:
    labels = read("rmt")[0]["labels"]

    def run(dtype: torch.dtype) -> tuple[petal.Adapter, dict[str, Tensor], Tensor]:
        source = {"source_data": source_batches(labels, norm, dtype), "warm_up": 33, "replay": 0.6} if data else {}
        return golden_run("rmt", petal.RMT, norm, optimizer, dtype, lr=RATES[optimizer] / 3, **source)

    adapter, golden, logits = run(torch.float64)
    case = "data." * data
    assert close(logits, golden[f"{case}logits"])
    for value, name in zip(parts(adapter), ("weights", "projector", "teacher"), strict=True):
        wanted = golden[case + name]
        if norm == "batch" and name == "weights":       # batch norm undoes conv1.bias: Adam makes steps of its rounding
            value, wanted = (torch.cat([t[:162], t[168:]]) for t in (value, wanted))
        assert close(value, wanted), name
    assert close(adapter.against.prototypes, read("rmt")[0][f"{norm}.prototypes"])
    quick, _, rough = run(torch.float32)
    assert quick.executor is not None
    assert close(rough, golden[f"{case}logits"], 2e-3)
    assert close(parts(quick)[1], golden[f"{case}projector"], 2e-3)


def made(**options: object) -> tuple[petal.RMT, list[Tensor]]:
    labels = read("rmt")[0]["labels"]
    model, batches = inputs()
    known = petal.collect_statistics(model, source_batches(labels), ["prototypes"])
    return petal.RMT(model, known, 0.01, **({"augment": augment, "optimizer": sgd, "projection": 6} | options)), batches


def test_the_three_answers() -> None:
    answers = {}
    for kind in ("own", "calibrated", "logits"):
        adapter, (x, y, *_) = made(answer=kind, ema=0.5)
        adapter(x)
        model, teacher = copy.deepcopy(adapter.model), copy.deepcopy(adapter.teacher)
        assert torch.equal(adapter.predict(y), adapter(y))
        answers[kind] = adapter.predict(x)
    student, both = model(y).detach(), model(y).detach() + teacher(y)
    adapter, _ = made(answer="own", ema=0.5)
    adapter(x)
    assert close(adapter(y), both, 1e-12)
    adapter, _ = made(answer="logits", ema=0.5)
    adapter(x)
    assert close(adapter(y), student, 1e-12)
    assert close(answers["calibrated"], answers["own"] / 2, 1e-12)


def test_a_reset_comes_back_to_the_end_of_the_warm_up() -> None:
    source = source_batches(read("rmt")[0]["labels"])
    adapter, batches = made(source_data=source, warm_up=40, ema=0.9, optimizer=None)
    began, first = adapter.state_dict(), [adapter(x) for x in batches]
    assert float(began["optimizer.state.conv1.weight.step"]) == 5
    assert "optimizer.state.projector_bias_1.step" not in began
    assert int(began["state.replayed"]) == 5
    assert not torch.equal(began["model.fc.bias"], began["teacher.fc.bias"])
    adapter.reset()
    now = adapter.state_dict()
    assert now.keys() == began.keys()
    assert all(torch.equal(value, began[key]) for key, value in now.items())
    assert all(torch.equal(adapter(x), y) for x, y in zip(batches, first, strict=True))
    adapter.load_state_dict(began)
    assert all(torch.equal(adapter(x), y) for x, y in zip(batches, first, strict=True))


def test_source_batches_go_round_and_can_be_returned_to() -> None:
    data = [(torch.full((2, 1), float(n)), torch.tensor([n, n])) for n in range(3)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*data, strict=True))), 2)
    for kind in (data, loader):
        batches = SourceBatches(kind, torch.device("cpu"), torch.float64)
        assert [int(batches(n)[1][0]) for n in (0, 1, 2, 3, 4, 4, 0, 2, 2, 7)] == [0, 1, 2, 0, 1, 1, 0, 2, 2, 1]
        assert batches(5)[0].dtype == torch.float64
    for wrong in ([], iter(data), torch.zeros(3), 5):
        with pytest.raises(ConfigError, match="source_data is a list of batches"):
            SourceBatches(wrong, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="source_data gives batches"):
        SourceBatches([torch.zeros(2, 3)], torch.device("cpu"), torch.float32)(0)


def test_what_adapts() -> None:
    every = {n for n, _ in inputs()[0].named_parameters()} | set(made()[0].against.parameters)
    assert set(made()[0].adapted) == set(made(adapts="all")[0].adapted) == every
    assert list(made(adapts="norm", projection=0)[0].adapted) == ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
    vit = network("vit")
    weights = petal.RMT(vit, statistics(vit)).adapted
    assert "cls_token" not in weights
    assert "cls_token" in petal.RMT(vit, statistics(vit), adapts="all").adapted


def test_the_projector_begins_at_random_numbers_of_the_adapter() -> None:
    first, again, other = (made(seed=seed)[0].against.parameters for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert first["projector_weight_1"].abs().max() <= 1 / math.sqrt(8)
    assert first["projector_weight_1"].abs().max() > 0.8 / math.sqrt(8)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_gradients_of_the_projector_on_programs_that_scale(low: torch.dtype | None) -> None:
    """Its weights are used outside of the network, whose programs scale what they give back."""
    def moved(policy: Policy | None) -> Tensor:
        golden, _ = read("rmt")
        model, batches = inputs(dtype=torch.float32)
        known = petal.collect_statistics(model, source_batches(golden["labels"], dtype=torch.float32), ["prototypes"])
        adapter = petal.RMT(model, known, 0.05, projection=6, temperature=0.5, augment=augment, optimizer=sgd)
        set_projector(adapter, golden["projector"])
        before = flat(adapter.against.parameters)
        if policy is not None:
            petal.accelerate(adapter, policy=policy)
        adapter(batches[0])
        return flat(adapter.against.parameters) - before

    way = moved(None)
    assert way.norm() > 1e-3
    assert (moved(Policy(low=low)) - way).norm() < (0.1 if low else 1e-4) * way.norm()


def test_what_does_not_fit_is_refused() -> None:
    model, _ = inputs()
    with pytest.raises(ConfigError, match="takes source statistics"):
        petal.RMT(model, None)
    with pytest.raises(StatisticsError, match="no prototypes"):
        petal.RMT(model, petal.collect_statistics(model, source_batches(read("rmt")[0]["labels"]), ["fisher"]))
    wrong = {"ema": 2, "temperature": 0, "projection": 1.5, "answer": "x", "adapts": "x", "contrast": -1, "consistency": -1,
             "replay": -1, "warm_up": -1}  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            made(**{name: value})
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    known = petal.collect_statistics(linear, source_batches(read("rmt")[0]["labels"]), ["prototypes"])
    with pytest.raises(ConfigError, match="adapts 'norm' parameters and this network has none"):
        petal.RMT(linear, known, adapts="norm")
    model.projector_bias_1 = None
    known = petal.collect_statistics(model, source_batches(read("rmt")[0]["labels"]), ["prototypes"])
    with pytest.raises(ConfigError, match="something called 'projector_bias_1'"):
        petal.RMT(model, known)


def test_a_checkpoint_is_of_its_source_whatever_the_seed(tmp_path: Path) -> None:
    adapter, (x, y, *_) = made(seed=0)
    adapter(x)
    petal.save(adapter, tmp_path / "state")
    other, _ = made(seed=1)
    petal.load(other, tmp_path / "state")
    assert torch.equal(adapter(y), other(y))
    model, _ = inputs()
    known = petal.collect_statistics(model, source_batches(read("rmt")[0]["labels"]), ["prototypes"])
    with torch.no_grad():
        model.fc.bias.add_(1)
    stranger = petal.RMT(model, known, 0.01, augment=augment, optimizer=sgd, projection=6)
    with pytest.raises(petal.PetalError, match="belongs to other source weights"):
        petal.load(stranger, tmp_path / "state")
