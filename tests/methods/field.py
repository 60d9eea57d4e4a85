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
    name: str, kind: Any, norm: str, optimizer: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[petal.Adapter, dict[str, Tensor], Tensor]:
    """Our method with a golden file's settings, after its batches; the file's results of this case; and our logits."""
    golden, settings = read(name)
    model, batches = inputs(norm, dtype)
    settings = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer], "augment": augment} | settings | options
    given = []
    if "labels" in golden:
        given.append(petal.collect_statistics(model, source_batches(golden["labels"], norm, dtype), ["prototypes"]))
    adapter = kind(model, *given, **settings)
    if "projector" in golden:
        set_projector(adapter, golden["projector"])
    if dtype == torch.float32:
        adapter = fast(adapter)
    logits = torch.cat([adapter(x) for x in batches])
    case = f"{norm}.{optimizer}."
    return adapter, {key.removeprefix(case): value for key, value in golden.items() if key.startswith(case)}, logits


def close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> bool:
    return left.shape == right.shape and bool((left.double() - right).abs().max() < tolerance)


def source_batches(labels: Tensor, norm: str = "batch", dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """The source data of the golden runs."""
    return list(zip(small(norm, dtype)[1][5].split(8), labels.split(8), strict=True))


def set_projector(adapter: petal.Adapter, values: Tensor) -> None:
    """Begin with the projector of the golden runs."""
    parts = list(adapter.against.parameters.values())
    with torch.no_grad():
        for parameter, value in zip(parts, values.split([p.numel() for p in parts]), strict=True):
            parameter.copy_(value.view_as(parameter))
