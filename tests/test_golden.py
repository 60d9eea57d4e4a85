"""The golden steps: what the released code computes in float64 on fixed inputs, number by number."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import petal
from petal import models

GOLDEN = Path(__file__).parent / "golden"
BATCHES = 4


class FixedViews:
    """The i-th view of a batch rolls the columns by i % 5 - 2, scales by 0.8 + 0.0125 i and clips."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        i = self.calls % 32
        self.calls += 1
        return (torch.roll(x, i % 5 - 2, dims=-1) * (0.8 + 0.0125 * i)).clamp(0, 1)


def inputs(dtype: torch.dtype) -> tuple[nn.Module, petal.DiagonalGaussian, list[Tensor]]:
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in load_file(GOLDEN / "inputs.safetensors").items()}

    def group(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    model = models.build("wrn-10-1", classes=10).to(dtype)
    model.load_state_dict(group("source."))
    q = petal.DiagonalGaussian(group("mean."), group("var."), damping=1e-6)
    return model, q, [tensors[f"x.{i}"] for i in range(BATCHES)]


def _petal(model: nn.Module, q: petal.DiagonalGaussian, tau: float) -> petal.Adapter:
    return petal.Petal(
        model, q, ema=0.99, confidence=tau, prior_weight=1e-6, restore=petal.Fisher(0.03), augment=FixedViews(),
        gate="batch", average="logits",
    )  # fmt: skip


CASES: dict[str, Callable[[nn.Module, petal.DiagonalGaussian], petal.Adapter]] = {
    "petal_fim_views": lambda model, q: _petal(model, q, 2.0),
    "petal_fim_gated": lambda model, q: _petal(model, q, 0.80),
    "cotta_views": lambda model, q: petal.CoTTA(
        model, ema=0.99, confidence=2.0, restore=petal.Stochastic(0), augment=FixedViews()
    ),
    "tent": lambda model, q: petal.Tent(model),
}


def differences(case: str, dtype: torch.dtype) -> tuple[list[float], Tensor]:
    """Largest difference of each batch's logits, and all differences of the final weights."""
    golden = load_file(GOLDEN / f"{case}.safetensors")
    model, q, batches = inputs(dtype)
    adapter = CASES[case](model, q)
    logits = [(adapter(x).double() - golden[f"{i}.logits"]).abs().max().item() for i, x in enumerate(batches)]
    weights = []
    for key, value in golden.items():
        which, _, name = key.removeprefix("3.").partition(".")
        if which in ("student", "teacher"):
            network = adapter.model if which == "student" else adapter.teacher
            weights.append((dict(network.named_parameters())[name].double() - value).abs().flatten())
    return logits, torch.cat(weights)


@pytest.mark.parametrize("case", CASES)
def test_float64_agrees_to_1e_9(case: str) -> None:
    logits, weights = differences(case, torch.float64)
    assert max(logits) < 1e-9
    assert len(weights) > 10
    assert weights.max() < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_as_far_as_it_can(case: str) -> None:
    logits, weights = differences(case, torch.float32)
    assert max(logits) < 1e-3
    # with a closed gate the gradient is small, and Adam makes steps of its rounding, which depends on the machine
    assert (weights < 1e-4).double().mean() > (0.99 if case == "petal_fim_gated" else 0.999)


def test_gate_opens_on_the_first_batch_only() -> None:
    model, q, batches = inputs(torch.float64)
    adapter = CASES["petal_fim_gated"](model, q)
    used = []
    for x in batches:
        adapter(x)
        used.append(adapter.views_used)
    assert used == [True, False, False, False]
    assert adapter.augment.calls == 32
