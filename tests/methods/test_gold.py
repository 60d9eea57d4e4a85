"""GOLD against runs of the authors' code, and its subspace."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import CASES, RATES, close, flat, golden_run, inputs, source_batches
from methods.golden import augment, fast, read, sgd
from networks import network, statistics
from petal.errors import ConfigError

RUNS = [*((*case, "weights") for case in CASES), ("batch", "adam", "norm"), ("group", "sgd", "norm"),
        ("batch", "sgd", "data"), ("batch", "adam", "data")]  # fmt: skip


def parts(adapter: petal.Adapter) -> dict[str, Tensor]:
    """Weights, projector and scales, some of the teacher and M, as the golden files have them."""
    heads = adapter.against.parameters | {"feature_scales": adapter.scales}
    own = {name: value for name, value in adapter.adapted.items() if name not in heads}
    teacher = dict(adapter.teacher.named_parameters())
    teacher = flat({name: teacher[name] for name in ("fc.bias", "bn2.weight")})
    return {"weights": flat(own), "heads": flat(heads), "teacher": teacher, "moment": adapter.moment}


@pytest.mark.parametrize(("norm", "optimizer", "what"), RUNS)
def test_gold_is_the_reference(norm: str, optimizer: str, what: str) -> None:
    labels = read("gold")[0]["labels"]

    def run(dtype: torch.dtype) -> tuple[petal.Adapter, dict[str, Tensor], Tensor]:
        options = {"norm": {"adapts": "norm"}, "data": {"source_data": source_batches(labels, norm, dtype), "warm_up": 33}}
        options = options.get(what, {}) | {"lr": RATES[optimizer] / 3}
        return golden_run("gold", petal.GOLD, norm, optimizer, dtype, **options)

    adapter, golden, logits = run(torch.float64)
    case = "" if what == "weights" else f"{what}."
    assert close(logits, golden[f"{case}logits"])
    for name, value in parts(adapter).items():
        wanted = golden[case + name]
        if norm == "batch" and name == "weights" and what != "norm":    # batch norm undoes conv1.bias
            value, wanted = (torch.cat([t[:162], t[168:]]) for t in (value, wanted))
        assert close(value, wanted, 1e-8 if name == "moment" else 1e-9), name       # of numbers around 10,000
    quick, _, rough = run(torch.float32)
    assert quick.executor is not None
    assert close(rough, golden[f"{case}logits"], 5e-3)


def made(norm: str = "group", **options: object) -> tuple[petal.GOLD, list[Tensor]]:
    model, batches = inputs(norm)
    known = petal.collect_statistics(model, source_batches(read("gold")[0]["labels"], norm), ["prototypes"])
    settings = {"lr": 0.01, "rank": 3, "every": 2, "confidence": 0.5, "projection": 6, "augment": augment, "optimizer": sgd}
    return petal.GOLD(model, known, **(settings | options)), batches


def test_the_subspace_by_hand() -> None:
    adapter, batches = made(share=0.3, lr=0.003)
    weight = adapter.model.fc.weight
    moment = weight.detach().numpy().T @ weight.detach().numpy()

    def projection(moment: np.ndarray) -> np.ndarray:
        vectors = np.linalg.svd(moment)[0][:, :3]
        return vectors @ vectors.T

    renewed = projection(moment)
    for number, x in enumerate(batches, start=1):
        w, s, v = (t.detach().numpy().copy() for t in (weight, adapter.scales, adapter.directions))
        assert np.allclose(v @ v.T, renewed, atol=1e-9)
        assert np.allclose(v.T @ moment @ v, np.diag(np.sort(np.diag(v.T @ moment @ v))[::-1]), atol=1e-6) or number % 2 == 0
        with torch.no_grad():
            features, logits = adapter.features(adapter.model, x)
            target = adapter.teacher(x)
        f = features.numpy() + (features.numpy() @ v * s) @ v.T
        scaled = f @ w.T + adapter.model.fc.bias.detach().numpy()
        answer = adapter(x).numpy()
        assert np.allclose(answer, scaled + target.numpy(), atol=1e-9)
        p = np.exp(scaled - scaled.max(1, keepdims=True))
        sure = (p / p.sum(1, keepdims=True)).max(1) >= 0.5
        rows = w[logits.argmax(1).numpy()[sure]]                            # the gradient of the largest logit
        assert len(rows) >= 2
        moment = 0.7 * moment + 0.3 * rows.T @ rows / len(rows)
        assert np.allclose(adapter.moment.numpy(), moment, rtol=1e-9)
        renewed = projection(moment) if number % 2 == 0 else renewed
    assert int(adapter.batches) == 5


def test_one_sure_sample_is_not_enough() -> None:
    for count, moves in ((1, False), (2, True)):
        adapter, (x, *_) = made(confidence=0.0)
        before = adapter.moment.clone()
        adapter(x[:count])
        assert torch.equal(adapter.moment, before) != moves
    adapter, (x, *_) = made(confidence=1.0)
    before = adapter.moment.clone()
    adapter(x)
    assert torch.equal(adapter.moment, before)


def test_what_adapts() -> None:
    scales, batches = made(adapts="scales")
    heads = {*scales.against.parameters, "feature_scales"}
    assert set(scales.adapted) == heads
    before, source = scales.scales.detach().clone(), flat(dict(scales.model.conv1.named_parameters()))
    for x in batches:
        scales(x)
    assert not close(scales.scales.detach(), before, 1e-4)
    assert close(flat(dict(scales.model.conv1.named_parameters())), source, 1e-15)
    assert set(made(adapts="norm")[0].adapted) == heads | {"bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}
    assert {"fc.weight", "conv1.bias"} <= set(made()[0].adapted)
    assert made(rank=64)[0].rank == 8
    vit = network("vit")
    assert "cls_token" in petal.GOLD(vit, statistics(vit), adapts="all").adapted


@pytest.mark.parametrize("engine", [False, True])
def test_the_scales_have_a_rate_of_their_own(engine: bool) -> None:
    def moved(scale_rate: float) -> tuple[Tensor, Tensor]:
        adapter, (x, *_) = made(scale_rate=scale_rate, optimizer=torch.optim.SGD)
        adapter = fast(adapter) if engine else adapter
        start = adapter.origin()
        adapter(x)
        return adapter.scales.detach().clone(), adapter.model.bn1.weight.detach() - start["bn1.weight"]

    (once, way), (thrice, same), (never, _) = moved(1.0), moved(3.0), moved(0.0)
    assert once.abs().min() > 1e-5
    assert close(thrice, 3 * once, 1e-12)
    assert close(way, same, 1e-12)
    assert not never.any()


def test_every_setting_changes_something() -> None:
    def weights(**options: object) -> Tensor:
        adapter, batches = made(**options)
        for x in batches:
            adapter(x)
        return flat({**adapter.adapted, "teacher": adapter.teacher.bn1.weight})

    plain = weights()
    others = {"ema": 0.5, "share": 0.5, "confidence": 0.9, "every": 1, "scale_rate": 2.0, "temperature": 0.5,
              "consistency": 0.5, "contrast": 0.5}  # fmt: skip
    for name, value in others.items():
        assert not close(weights(**{name: value}), plain, 1e-8), name
    assert weights(rank=2).shape != plain.shape


def test_state_goes_on_in_the_middle_of_a_period() -> None:
    adapter, (x, y, z, *_) = made(every=3)
    adapter(x), adapter(y)
    other, _ = made(every=3, seed=1)
    other.load_state_dict(adapter.state_dict())
    before = adapter.directions.clone()
    assert torch.equal(adapter(z), other(z))
    assert not torch.equal(adapter.directions, before)
    assert torch.equal(adapter.directions, other.directions)
    assert torch.equal(adapter.predict(x), adapter(x))


def test_what_does_not_fit_is_refused() -> None:
    wrong = {"rank": 0, "share": 2, "confidence": 2, "every": 0, "scale_rate": -1, "contrast": -1, "warm_up": -1,
             "adapts": "x", "temperature": 0, "ema": 2, "lr": -1}  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            made(**{name: value})
    with pytest.raises(ConfigError, match="takes source statistics"):
        petal.GOLD(inputs()[0], None)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    known = petal.collect_statistics(linear, source_batches(read("gold")[0]["labels"]), ["prototypes"])
    with pytest.raises(ConfigError, match="adapts 'norm' parameters and this network has none"):
        petal.GOLD(linear, known, adapts="norm")
    assert petal.GOLD(linear, known, adapts="scales", augment=augment)(inputs()[1][0]).shape == (16, 10)
