"""Every option of every method changes something: answers, weights, or what the method keeps of the stream."""

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import petal
from methods.field import inputs
from methods.golden import augment, sgd
from petal.destroy import Occlusion

# What makes the options of a method matter on a small network and a short stream
USUAL: dict[str, dict[str, Any]] = {
    "pseudo-label": {}, "tent": {}, "rpl": {},
    "eta": {"margin": 0.6, "similarity": 0.7}, "eata": {"margin": 0.6, "similarity": 0.7},
    "rdumb": {"margin": 0.6, "similarity": 0.7, "every": 4},
    "sar": {"margin": 0.3, "reset_threshold": 0.09}, "deyo": {"margin": 0.6, "plpd": 0.05, "frozen": ()},
    "roid": {}, "cmf": {"noise": 40.0, "share": 0.1}, "rmt": {"ema": 0.9, "warm_up": 16}, "santa": {},
    "rotta": {"memory": 12, "every": 12, "ema": 0.9}, "note": {"memory": 6, "every": 8}, "petta": {"memory": 12, "ema": 0.9},
    "cotta": {"views": 2, "confidence": 0.99, "ema": 0.9}, "petal": {"views": 2, "confidence": 0.7, "ema": 0.9},
    "source": {}, "bn": {"share": 0.5}, "lame": {}, "gold": {"warm_up": 16}, "palm": {"threshold": 2.7},
}  # fmt: skip
# Another value of each option, for all methods that have it
OTHER: dict[str, Any] = {
    "lr": 0.05, "optimizer": sgd, "steps": 2, "episodic": True, "frozen": ("bn2",),
    "margin": 0.4, "similarity": 0.3, "momentum": 0.2, "loss": "come", "fisher_weight": 3.0, "every": 3,
    "q": 0.3, "rho": 0.5, "reset_threshold": 0.0, "reset_optimizer": True, "reset_average": False, "skip_empty": True,
    "weight_margin": 0.1, "plpd": 0.3, "destroy": Occlusion(4, 2, 2), "destroyed": "all",
    "weigh_entropy": False, "weigh_plpd": False,
    "share": 0.3, "temperature": 1.7, "weighting": False, "consistency": 0.3, "augment": augment, "augmented": "all",
    "answer": "logits", "batch_size": 100, "forget": 0.5, "noise": 400.0,
    "ema": 0.5, "projection": 4, "contrast": 0.2, "adapts": "norm", "replay": 0.3, "warm_up": 32,
    "memory": 5, "norm_momentum": 0.4, "timeliness": 5.0,
    "uncertainty": 9.0, "shrink": 0.3, "epochs": 2, "pull": 1000.0, "regularizer": "l2", "anchor": 0.1,
    "prototype_momentum": 0.1, "adaptive_pull": False, "adaptive_ema": False,
    "affinity": "knn", "neighbours": 2, "sigma": 0.2, "weight": 0.2, "symmetric": True, "iterations": 2, "tolerance": 0.1,
    "views": 5, "confidence": 0.2, "restore": petal.Stochastic(0.5), "gate": "sample", "average": "logits",
    "prior_weight": 1.0, "learn": "both", "target": "teacher+student", "warmup": 2.0, "calibrate": "teacher+student",
    "rank": 3, "memory_batch": 5, "prototypes": "weights", "unselected": "frozen",
}  # fmt: skip
OWN: dict[tuple[str, str], Any] = {
    ("cotta", "loss"): "symmetric", ("petal", "loss"): "symmetric", ("petta", "loss"): "cross-entropy",
    ("petal", "answer"): "student", ("petal", "gate"): "batch", ("cotta", "average"): "probs", ("lame", "answer"): "own",
    ("memo", "episodic"): False,
}  # fmt: skip
# With what else an option shows, where that is not the usual
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("sar", "reset_optimizer"): {"optimizer": sgd},
    ("sar", "skip_empty"): {"optimizer": sgd, "margin": 0.006, "rho": 0.0, "reset_threshold": 0.0},
    ("lame", "symmetric"): {"affinity": "knn"}, ("petal", "samples"): {"answer": "teacher+samples"},
}  # fmt: skip
GIVEN = ("model", "statistics", "posterior", "source_data")     # not settings


def needs(model: torch.nn.Module, method: str) -> list[Any]:
    """What the constructor takes besides settings."""
    names = inspect.signature(petal.METHODS[method]).parameters
    if "posterior" in names:
        return [petal.DiagonalGaussian.isotropic(model, std=0.05)]
    if "statistics" not in names:
        return []
    source = [x for batch in inputs()[1][:3] for x in (batch, 1 - batch)]
    return [petal.collect_statistics(model, source, labels="predicted", batch_statistics=method != "petta")]


def outcome(method: str, **options: Any) -> list[Tensor]:
    """Answers to a stream, and what it left."""
    model, batches = inputs()
    if "source_data" in inspect.signature(petal.METHODS[method]).parameters:
        options = {"source_data": [(1 - x, x.mean((1, 2, 3)).mul(10).long()) for x in batches[:2]]} | options
    rate = {"lr": 0.02} if "lr" in inspect.signature(petal.METHODS[method]).parameters else {}
    settings = rate | USUAL.get(method, {}) | options
    adapter = petal.METHODS[method](model, *needs(model, method), **settings)
    answers = [adapter(x) for x in batches]
    return [*answers, *(value for key, value in adapter.state_dict().items() if not key.startswith("optimizer"))]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@cache
def usual(method: str) -> list[Tensor]:
    first = outcome(method)
    assert same(first, outcome(method)), "the stream must be the same every time"
    return first


def before(method: str, option: str) -> list[Tensor]:
    """The outcome that another value of an option has to change."""
    return outcome(method, **BESIDE[method, option]) if (method, option) in BESIDE else usual(method)


CASES = [
    (method, option)
    for method, kind in petal.METHODS.items()
    for option in inspect.signature(kind).parameters
    if option not in (*GIVEN, "seed")
]


@pytest.mark.parametrize(("method", "option"), CASES)
def test_an_option_changes_something(method: str, option: str) -> None:
    value, beside = OWN.get((method, option), OTHER.get(option)), BESIDE.get((method, option), {})
    if value is None:
        default = inspect.signature(petal.METHODS[method]).parameters[option].default
        assert isinstance(default, (bool, int, float)), f"{option} of {method} has no other value in this test: give it one"
        value = not default if isinstance(default, bool) else type(default)(default * 2 + 1)
    assert not same(before(method, option), outcome(method, **beside, **{option: value}))


@pytest.mark.parametrize("method", ["rmt", "gold"])
def test_source_data_is_learned_from(method: str) -> None:
    assert not same(usual(method), outcome(method, source_data=None))


RANDOM = {name: kind.card.random for name, kind in petal.METHODS.items() if kind.card is not None}


@pytest.mark.parametrize("method", [name for name in RANDOM if RANDOM[name]])
def test_the_seed_changes_what_a_card_calls_random(method: str) -> None:
    assert not same(usual(method)[:5], outcome(method, seed=1)[:5])


@pytest.mark.parametrize("method", [name for name in RANDOM if not RANDOM[name]])
def test_what_a_card_calls_not_random_draws_nothing(method: str) -> None:
    model, batches = inputs()
    adapter = petal.METHODS[method](model, *needs(model, method))
    began = adapter.generator.get_state()
    for x in batches[:2]:
        adapter(x)
    assert torch.equal(adapter.generator.get_state(), began)


def test_one_name_means_one_thing() -> None:
    """The same kinds of values and the same place: `lr` right after the network and what is known of the source."""
    kinds: dict[str, set[Any]] = {}
    for kind in petal.METHODS.values():
        parameters = [p for p in inspect.signature(kind).parameters.values() if p.name not in ("self", "model")]
        settings = [p.name for p in parameters if p.name not in ("statistics", "posterior")]
        assert "lr" not in settings or settings[0] == "lr"
        for p in parameters:
            kinds.setdefault(p.name, set()).add(bool if isinstance(p.default, bool) else type(p.default))
    assert {name: found for name, found in kinds.items() if len(found - {type(None)}) > 1} == {"restore": kinds["restore"]}
