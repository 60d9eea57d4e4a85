"""ReservoirTTA against runs of the authors' code, and what becomes of domains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import close
from methods.golden import OPTIMIZERS, augment, read, small

RATES = {"adam": 0.005, "sgd": 0.0003}
ORDER = (0, 0, 0, 1, 1, 1, 0, 2, 2, 1, 0, 3, 3, 4, 1, 2, 0, 5, 4, 1, 0, 2, 3, 3, 0, 1, 2, 0, 4, 5, 0, 1, 3, 2)
CASES = [(kind, norm, opt) for kind in ("tent", "eta", "eata", "roid") for norm in ("batch", "group") for opt in OPTIMIZERS]
CASES += [("sar", "batch", "sgd"), ("sar", "group", "sgd")]


def changed(x: Tensor, domain: int) -> Tensor:
    """The same images in one of six domains."""
    mixed = (x + 0.3 * x.flip(2)).clamp(0, 1)
    return [x, x * 0.5 + 0.2, mixed, x.roll(1, 3) * 0.7 + 0.3 * x, 1 - x * 0.3, x * x][domain]


def stream(norm: str = "batch", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor]]:
    """The network, and batches of six domains in turn, two of them short."""
    model, x = small(norm, dtype)
    batches = [changed(x[number % 6], domain) for number, domain in enumerate(ORDER)]
    batches[17], batches[-1] = batches[17][:9], batches[-1][:7]
    return model, batches


def style(x: Tensor) -> Tensor:
    """The style of the golden runs: variances of pixels, and of differences of neighbours, by channel."""
    edges = x[..., 1:] - x[..., :-1]
    return torch.cat([x.var((0, 2, 3)).log(), edges.var((0, 2, 3)).log()])


def source(dtype: torch.dtype = torch.float64) -> petal.SourceStatistics:
    """Styles of the source batches of the golden runs."""
    batches = [small()[1][b, :20].roll(s, 2) * (1 - 0.02 * s) for b in range(6) for s in range(2)]
    return petal.SourceStatistics(styles=torch.stack([style(x) for x in batches]).to(dtype))


def base(kind: str, model: nn.Module, optimizer: str) -> petal.Adapter:
    """The method inside, with the settings of the golden runs."""
    common: dict[str, Any] = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer], "seed": 7}
    if kind == "tent":
        return petal.Tent(model, **common)
    if kind == "sar":
        return petal.SAR(model, margin=0.9, reset_threshold=0.2, reset_optimizer=True, frozen=(), **common)
    if kind == "roid":
        more = {"share": 0.03, "momentum": 0.8, "temperature": 0.5, "batch_size": 24, "augment": augment}
        return petal.ROID(model, **common, **more)
    if kind == "eta":
        return petal.ETA(model, margin=0.9, similarity=0.99, **common)
    generator = torch.Generator().manual_seed(5)
    names = petal.norm.affine_parameters(model)
    fisher = {name: torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p) for name, p in names.items()}
    known = petal.SourceStatistics(fisher=fisher)
    return petal.EATA(model, known, margin=0.9, similarity=0.99, fisher_weight=0.3, **common)


def reservoir(kind: str, model: nn.Module, optimizer: str = "adam", **options: Any) -> petal.Reservoir:
    """Around it, with the settings of the golden runs."""
    dtype = next(model.parameters()).dtype
    given = {"statistics": source(dtype), "capacity": 4, "buffer": 24, "quantile": 0.25, "style": style} | options
    return petal.Reservoir(base(kind, model, optimizer), **given)


def run(adapter: petal.Reservoir, batches: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The last answers, and the domain of each batch."""
    found = [(adapter(x), adapter.active) for x in batches]
    return torch.cat([logits for logits, _ in found[-7:]]), [domain for _, domain in found]


@pytest.mark.parametrize(("kind", "norm", "optimizer"), CASES)
def test_reservoir_is_the_reference(kind: str, norm: str, optimizer: str) -> None:
    """Of SAR the released code, which has one momentum for all domains, was put right before it ran."""
    golden, _ = read("reservoir")
    model, batches = stream(norm)
    adapter = reservoir(kind, model, optimizer)
    assert close(adapter.clusters.threshold, golden["threshold"])
    logits, domains = run(adapter, batches)
    golden = {key.removeprefix(f"{kind}.{norm}.{optimizer}."): value for key, value in golden.items()}
    assert domains == golden["ways"].tolist()
    assert adapter.domains == 4
    assert close(logits, golden["logits"])
    assert close(adapter.own_state()["bank"], golden["bank"])
    assert close(adapter.clusters.mean + adapter.clusters.delta.detach(), golden["centroids"])
    assert close(adapter.clusters.sample, golden["sample"])
