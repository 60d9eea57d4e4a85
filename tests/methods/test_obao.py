"""OBAO against runs of the authors' code, and its memory and relations."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import CASES, RATES, close, flat, golden_run, inputs, source_batches
from methods.golden import augment, read, sgd
from networks import images, network, statistics
from petal.errors import ConfigError, StatisticsError
from petal.losses import relations_kept


def parts(adapter: petal.Adapter) -> dict[str, Tensor]:
    """Weights, some of the teacher, and the memory, as the golden files have them."""
    teacher = dict(adapter.teacher.named_parameters())
    followed = flat({name: teacher[name] for name in ("conv2.weight", "bn2.weight")})
    return {"weights": flat(adapter.adapted), "teacher": followed, "memory": adapter.memory_facts[:, [0, 2]]}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_obao_is_the_reference(norm: str, optimizer: str, free: bool) -> None:
    """The authors' code was given the random numbers that choose from the memory here."""
    options = {"lr": RATES[optimizer] / 3, "prototypes": "weights" if free else "source"}
    adapter, golden, logits = golden_run("obao", petal.OBAO, norm, optimizer, **options)
    case = "free." * free
    assert close(logits, golden[f"{case}logits"])
    for name, value in parts(adapter).items():
        wanted = golden[case + name]
        if norm == "batch" and name == "weights":       # batch norm undoes conv1.bias: Adam makes steps of its rounding
            value, wanted = (torch.cat([t[:162], t[168:]]) for t in (value, wanted))
        assert close(value, wanted), name
    quick, _, rough = golden_run("obao", petal.OBAO, norm, optimizer, torch.float32, **options)
    assert quick.executor is not None
    assert close(rough, golden[f"{case}logits"], 5e-3)


def made(norm: str = "group", **options: object) -> tuple[petal.OBAO, list[Tensor]]:
    model, batches = inputs(norm)
    known = petal.collect_statistics(model, source_batches(read("obao")[0]["labels"], norm), ["prototypes"])
    return petal.OBAO(model, known, **({"lr": 0.01, "augment": augment, "optimizer": sgd, "margin": 0.6} | options)), batches


def test_the_memory_takes_what_is_sure_and_lets_the_least_sure_go() -> None:
    adapter, (x, y, *_) = made(lr=0.0, memory=6)
    model, teacher = copy.deepcopy(adapter.model), copy.deepcopy(adapter.teacher)

    def of(x: Tensor) -> list[tuple[float, int, Tensor]]:
        logits = model(x)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        labels = (logits + teacher(x)).argmax(1)
        return [(h.item(), int(y), i) for h, y, i in zip(entropy, labels, x, strict=True) if h < 0.6 * np.log(10)]

    expected: list[tuple[float, int, Tensor]] = []
    for batch in (x[:4], x[4:12], x[12:], y[:3], y):
        adapter(batch)
        new = of(batch)
        free = 6 - len(expected)
        expected, new = expected + new[:free], new[free:]
        order = sorted(range(6), key=lambda n: -expected[n][0]) if new else []
        for place, item in zip(order, new, strict=False):       # what comes beyond six is dropped
            expected[place] = item
        rows = adapter.memory_facts
        assert int((rows[:, 0] >= 0).sum()) == len(expected)
        for place, (h, label, image) in enumerate(expected):
            assert rows[place, 0] == label
            assert abs(rows[place, 2] - h) < 1e-12
            assert torch.equal(adapter.memory_samples[place], image)


def test_what_is_drawn_from_the_memory() -> None:
    adapter, (x, y, *_) = made(memory=10)
    assert adapter.memory.drawn(4) is None
    adapter(x)
    whole, labels = adapter.memory.drawn(10)
    assert torch.equal(whole, adapter.memory_samples[: len(whole)])
    assert torch.equal(labels, adapter.memory_facts[: len(whole), 0].long())
    seen = set()
    for _ in range(40):
        some, of = adapter.memory.drawn(4)
        places = [next(n for n, image in enumerate(whole) if torch.equal(image, each)) for each in some]
        assert len(set(places)) == 4
        assert torch.equal(of, labels[places])
        seen |= set(places)
    assert len(seen) == len(whole)
    same = [made(memory=10, memory_batch=4, seed=seed)[0] for seed in (0, 0, 1)]
    answers = [[adapter(batch) for batch in (x, y, x)][-1] for adapter in same]
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_relations_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    features, rows = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (9, 6))
    labels = torch.tensor([5, 5, 0, 0, 0, 3, 5, 3, 0])
    means = np.stack([features[labels == c].mean(0).numpy() for c in (0, 3, 5)])
    then = rows[[0, 3, 5]].numpy()
    g, h = ((m / np.linalg.norm(m, axis=1, keepdims=True)) for m in (means, then))
    g, h = g @ g.T, h @ h.T
    wanted = -(g * h).sum() / np.sqrt((g**2).sum() * (h**2).sum())
    assert abs(relations_kept(features, labels, rows).item() - wanted) < 1e-12
    features.requires_grad_()
    relations_kept(features, torch.full((9,), 2), rows).backward()              # one class alone says nothing
    assert features.grad.abs().max() < 1e-12


def test_every_setting_changes_something() -> None:
    def weights(**options: object) -> Tensor:
        adapter, batches = made(**({"memory_batch": 10} | options))
        for x in batches:
            adapter(x)
        return flat({**adapter.adapted, "teacher": adapter.teacher.bn1.weight})

    plain = weights()
    others = {"ema": 0.5, "margin": 0.4, "memory": 8, "memory_batch": 4, "consistency": 0.5, "replay": 0.2, "relation": 9.0,
              "prototypes": "weights", "restore": petal.Stochastic(0.3)}  # fmt: skip
    for name, value in others.items():
        assert not close(weights(**{name: value}), plain, 1e-7), name
    assert close(weights(replay=0, relation=0), weights(replay=0, relation=0, margin=0.0), 1e-12)   # RMT without contrast


def test_the_classifier_stays_and_statistics_may_be_missing() -> None:
    adapter, batches = made()
    for x in batches:
        adapter(x)
    assert not {"fc.weight", "fc.bias"} & set(adapter.adapted)
    assert torch.equal(adapter.model.fc.weight, inputs("group")[0].fc.weight)
    assert "head.weight" not in petal.OBAO(network("vit"), statistics(network("vit")), adapts="all").adapted
    model, _ = inputs()
    with pytest.raises(ConfigError, match="or prototypes='weights' without"):
        petal.OBAO(model)
    assert petal.OBAO(model, prototypes="weights").organised.shape == (10, 8)
    with pytest.raises(StatisticsError, match="no prototypes"):
        petal.OBAO(model, petal.collect_statistics(model, source_batches(read("obao")[0]["labels"]), ["fisher"]))
    with pytest.raises(ConfigError, match="ends in a linear layer"):
        petal.OBAO(nn.Sequential(nn.Conv2d(3, 5, 8), nn.Flatten()), prototypes="weights")
    wrong = {"margin": -1, "memory": 0, "memory_batch": 0, "replay": -1, "relation": -1, "prototypes": "x", "ema": 2}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            made(**{name: value})


def test_answers_that_are_not_finite_are_not_remembered() -> None:
    model = network()
    adapter = petal.OBAO(model, prototypes="weights", margin=1.0)
    adapter(images(seed=1))
    facts, samples = adapter.memory_facts.clone(), adapter.memory_samples.clone()
    weights = {name: value.clone() for name, value in adapter.weights().items()}
    kept = adapter.model.conv1.weight.detach().clone()
    with torch.no_grad():
        adapter.model.conv1.weight.fill_(float("inf"))
    adapter(images(seed=2))
    assert adapter.skipped == 1
    assert torch.equal(adapter.memory_facts, facts)
    assert torch.equal(adapter.memory_samples, samples)
    with torch.no_grad():
        adapter.model.conv1.weight.copy_(kept)
    assert all(torch.equal(value, weights[name]) for name, value in adapter.weights().items())


def test_inside_the_small_batch_mode() -> None:
    adapter = petal.SmallBatch(petal.OBAO(network(), prototypes="weights", margin=1.0), memory=12, every=12)
    for seed in range(6):
        assert adapter(images(4, seed=seed)).isfinite().all()
    assert int((adapter.memory_facts[:, 0] >= 0).sum()) > 0
