"""The methods against an independent NumPy version of Algorithm 2 (tests/oracle), in float64, step by step.

The gate opens on the first batch of every case: until it has, the gradient is rounding noise (see `Petal`).
"""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from oracle import network as oracle_network
from oracle.algorithm import NumpyCoTTA, NumpyPetal, NumpyPseudoLabel, NumpyTent

BATCHES = 5
TOLERANCE = 1e-9


class FixedViews:
    """Views that depend on their number only, in torch and in NumPy alike."""

    def __init__(self, views: int) -> None:
        self.views, self.calls = views, 0

    def __call__(self, x: Tensor) -> Tensor:
        i = self.calls % self.views
        self.calls += 1
        return (torch.roll(x, i % 3 - 1, dims=-1) * (0.8 + 0.1 * i)).clamp(0, 1)

    @staticmethod
    def numpy(x: np.ndarray, i: int) -> np.ndarray:
        return np.clip(np.roll(x, i % 3 - 1, axis=-1) * (0.8 + 0.1 * i), 0, 1)


def source() -> tuple[dict[str, np.ndarray], nn.Module]:
    parameters = oracle_network.initial_parameters(seed=0)
    return parameters, oracle_network.torch_network(parameters)


def posterior(parameters: dict[str, np.ndarray], model: nn.Module) -> tuple[dict[str, np.ndarray], petal.DiagonalGaussian]:
    generator = np.random.default_rng(1)
    var = {name: generator.uniform(-1e-7, 1e-5, value.shape) for name, value in parameters.items()}  # some below zero
    q = petal.DiagonalGaussian(
        {k: torch.tensor(v) for k, v in parameters.items()}, {k: torch.tensor(v) for k, v in var.items()}, damping=1e-6
    )
    return var, q


def agree(expected: dict[str, np.ndarray], network: nn.Module) -> None:
    got = dict(network.named_parameters())
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name].detach().numpy(), value, rtol=0, atol=TOLERANCE, err_msg=name)


def follow(oracle: NumpyPetal, adapter: petal.Adapter, opens_first: bool = True) -> list[bool]:
    opened = []
    for seed in range(BATCHES):
        x = oracle_network.images(seed=seed)
        expected = oracle.step(x)
        got = adapter(torch.tensor(x))
        np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=TOLERANCE)
        opened.append(bool(np.any(oracle.opened)))
        assert adapter.views_used == opened[-1]
        agree(oracle.student, adapter.model)
        agree(oracle.teacher, adapter.teacher)
        agree(oracle.source, adapter.source)
    if opens_first:
        assert opened[0]
    return opened


SETTINGS = {
    "paper": {},
    "always": {"confidence": 2.0},
    "official": {"gate": "batch", "average": "logits", "confidence": 0.79},
    "imagenet": {"gate": "batch", "average": "logits", "confidence": 0.79, "loss": "symmetric"},
    "prior-strong": {"prior_weight": 1e-3},
    "prior-none": {"prior_weight": 0.0},
    "ema-fast": {"ema": 0.5},
    "ema-off": {"ema": 1.0},
    "ema-copy": {"ema": 0.0},
    "delta-none": {"restore": 0.0},
    "delta-large": {"restore": 0.5},
    "delta-all": {"restore": 1.0},
    "no-restore": {"restore": None},
    "lr": {"lr": 1e-2},
    "one-view": {"views": 1},
    "steps": {"steps": 3},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_petal(case: str) -> None:
    options = {"confidence": 0.79, "prior_weight": 1e-6, "ema": 0.99, "views": 4, "restore": 0.03} | SETTINGS[case]
    delta = options.pop("restore")
    parameters, model = source()
    var, q = posterior(parameters, model)
    views = FixedViews(options["views"])
    oracle = NumpyPetal(
        parameters, var, augment=FixedViews.numpy, damping=1e-6,
        restore=None if delta is None else ("fisher", delta), **options,
    )  # fmt: skip
    adapter = petal.Petal(
        model, q, augment=views, restore=None if delta is None else petal.Fisher(delta), **options
    )
    opened = follow(oracle, adapter)
    assert views.calls == sum(opened) * options["views"] * options.get("steps", 1)


@pytest.mark.parametrize(
    ("gate", "average", "loss", "optimizer"),
    list(itertools.product(("sample", "batch"), ("probs", "logits"), ("cross-entropy", "symmetric"), ("adam", "sgd"))),
)
def test_petal_in_every_combination(gate: str, average: str, loss: str, optimizer: str) -> None:
    options = {"confidence": 0.785, "prior_weight": 1e-6, "ema": 0.95, "views": 3, "lr": 1e-2}
    parameters, model = source()
    var, q = posterior(parameters, model)

    def sgd(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True)

    oracle = NumpyPetal(
        parameters, var, augment=FixedViews.numpy, restore=("fisher", 0.1), gate=gate, average=average, loss=loss,
        optimizer=optimizer, **options,
    )  # fmt: skip
    adapter = petal.Petal(
        model, q, augment=FixedViews(3), restore=petal.Fisher(0.1), gate=gate, average=average, loss=loss,
        optimizer=sgd if optimizer == "sgd" else None, **options,
    )  # fmt: skip
    opened = follow(oracle, adapter)
    if gate == "batch":
        assert not all(opened), "the gate should open on some batches only"


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_cotta(probability: float) -> None:
    """The masks come from the method's own random numbers, written down and given to the oracle."""
    parameters, model = source()
    drawn: list[dict[str, np.ndarray]] = []

    class Recorded(petal.Stochastic):
        def masks(self, params: list[Tensor], generator: torch.Generator) -> list[Tensor]:
            masks = super().masks(params, generator)
            drawn.append(dict(zip(parameters, [m.numpy() for m in masks], strict=True)))
            return masks

    adapter = petal.CoTTA(
        model, ema=0.9, views=3, confidence=0.79, augment=FixedViews(3), restore=Recorded(probability), lr=1e-2
    )
    oracle = NumpyCoTTA(
        parameters, augment=FixedViews.numpy, ema=0.9, views=3, confidence=0.79, lr=1e-2,
        restore=("stochastic-mask", lambda: drawn[-1]),
    )  # fmt: skip
    for seed in range(BATCHES):
        x = oracle_network.images(seed=seed)
        got = adapter(torch.tensor(x))
        np.testing.assert_allclose(got.numpy(), oracle.step(x), rtol=0, atol=TOLERANCE)
        agree(oracle.student, adapter.model)
        agree(oracle.teacher, adapter.teacher)
    assert len(drawn) == BATCHES
    assert abs(float(adapter.restored) - probability) < 0.1


@pytest.mark.parametrize(("kind", "oracle_kind"), [(petal.Tent, NumpyTent), (petal.PseudoLabel, NumpyPseudoLabel)])
@pytest.mark.parametrize("steps", [1, 2])
def test_affine_methods(kind: type[petal.Tent], oracle_kind: type[NumpyTent], steps: int) -> None:
    parameters, model = source()
    adapter, oracle = kind(model, lr=1e-2, steps=steps), oracle_kind(parameters, lr=1e-2, steps=steps)
    for seed in range(BATCHES):
        x = oracle_network.images(seed=seed)
        np.testing.assert_allclose(adapter(torch.tensor(x)).numpy(), oracle.step(x), rtol=0, atol=TOLERANCE)
        agree(oracle.student, adapter.model)
