"""What the tests of consistency and contrastive methods share: batches, rates and weights of the golden runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import petal
from methods.golden import OPTIMIZERS, augment, fast, read, small

RATES = {"adam": 3e-3, "sgd": 0.02}
CASES = [(norm, optimizer) for norm in ("batch", "group") for optimizer in OPTIMIZERS]


def inputs(norm: str = "batch", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor]]:
    """The network, and five batches of which the last is short."""
    model, x = small(norm, dtype)
    return model, [*x[:4, :16], x[4, :7]]


def flat(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in values.values()])


def golden_run(
    name: str, kind: Any, norm: str, optimizer: str, *given: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[petal.Adapter, dict[str, Tensor], Tensor]:
    """Our method with a golden file's settings, after its batches; the file's results of this case; and our logits."""
    golden, settings = read(name)
    model, batches = inputs(norm, dtype)
    settings = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer], "augment": augment} | settings | options
    adapter = kind(model, *given, **settings)
    if dtype == torch.float32:
        adapter = fast(adapter)
    logits = torch.cat([adapter(x) for x in batches])
    case = f"{norm}.{optimizer}."
    return adapter, {key.removeprefix(case): value for key, value in golden.items() if key.startswith(case)}, logits


def close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> bool:
    return left.shape == right.shape and bool((left.double() - right).abs().max() < tolerance)
