"""Golden files of the methods with a memory: a small network in double precision, and what reference code made of it."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import petal
from petal.engine import Policy

FIELD = Path(__file__).parent.parent / "golden" / "field"


class Small(nn.Module):
    """The network that the reference ran: its `norm` is "batch" or "group"."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else (lambda c: nn.GroupNorm(2, c))
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), make(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), make(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(x.mean((2, 3)))


def read(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a golden file."""
    with safe_open(FIELD / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["settings"])


def small(norm: str = "batch", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """The network with its weights, and the batches [batches, N, 3, 8, 8]."""
    tensors, _ = read("memory_inputs")
    model = Small(norm).double().eval()
    weights = {key.removeprefix(f"{norm}."): value for key, value in tensors.items() if key.startswith(norm)}
    counters = {key: value for key, value in model.state_dict().items() if "num_batches" in key}
    model.load_state_dict(weights | counters)
    return model.to(dtype), tensors["x"].to(dtype)


def augment(x: Tensor) -> Tensor:
    """The fixed augmentation of the golden runs."""
    return x.flip(-1) * 0.9 + 0.05


def fast(adapter: petal.Adapter) -> petal.Adapter:
    """On the engine, with nothing compiled."""
    return petal.accelerate(adapter, policy=copy.copy(Policy()))


def sgd(p: Any, lr: float) -> torch.optim.Optimizer:
    """The collection's SGD."""
    return torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True)


OPTIMIZERS = {"adam": None, "sgd": sgd}


def replay(name: str, kind: Any, *known: Any, tolerance: float = 1e-12, quick: float = 2e-3, **more: Any) -> petal.Adapter:
    """Run a method over the batches as reference code did; logits and weights are those of the golden file.

    Then on the engine, in single precision, where logits agree to `quick` times their size.
    """
    golden, settings = read(name)
    norm, optimizer = settings.pop("norm", "batch"), settings.pop("optimizer", None)
    options = settings | more | ({} if optimizer is None else {"optimizer": OPTIMIZERS[optimizer]})
    model, batches = small(norm)
    adapter: petal.Adapter = kind(model, *known, **options)
    got = torch.stack([adapter(x) for x in batches])
    assert (got - golden["logits"]).abs().max() < tolerance
    weights = adapter.weights()
    expected = {key: value for key, value in golden.items() if key.startswith(("model.", "teacher.", "source."))}
    assert not expected.keys() - weights.keys()
    for key, value in expected.items():
        assert (weights[key] - value).abs().max() < tolerance, key
    model, batches = small(norm, torch.float32)
    single = fast(kind(model, *(k.to(dtype=torch.float32) for k in known), **options))
    got = torch.stack([single(x) for x in batches]).double()
    assert (got - golden["logits"]).abs().max() < quick * golden["logits"].abs().max()
    return adapter
