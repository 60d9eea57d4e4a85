"""A guard around a network whose logits are its input: what student and source say is set by hand."""

import torch
from torch import Tensor, nn

import petal
from petal import Guard

CLASSES = 5


class Scripted(petal.Adapter):
    """Learns nothing by itself: a test moves its weights between batches, or lets `drift` be added at every step."""

    def __init__(self, bias: bool = True) -> None:
        layer = nn.Linear(CLASSES, CLASSES, bias=bias)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(CLASSES))
            if bias:
                layer.bias.zero_()
        super().__init__(layer, batch_statistics=False)
        self.adapt(dict(self.model.named_parameters()), 1e-3)
        self.drift: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        logits = self.logits(self.model, x)
        if self.drift is not None:
            with torch.no_grad():
                self.adapted["weight"].add_(self.drift)
        return logits


def batch(seed: int, labels: Tensor | None = None, sure: float = 4.0, n: int = 40) -> Tensor:
    """Logits that say `labels` (all classes alike unless given), with some noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES if labels is None else labels
    return sure * nn.functional.one_hot(labels, CLASSES) + 0.3 * torch.randn(n, CLASSES, generator=generator)


def collapse(guard: Guard) -> None:
    """Everything is class 0 from here on."""
    with torch.no_grad():
        guard.adapted["weight"].zero_()
        guard.adapted["bias"].copy_(torch.tensor([8.0, 0, 0, 0, 0]))


def make(policy: str = "rollback", **options: object) -> Guard:
    settings: dict[str, object] = {"every": 2, "window": 400, "cooldown": 240} | options
    return Guard(Scripted(), policy, **settings)  # type: ignore[arg-type]


def drive(guard: Guard, count: int, first: int = 0, **options: object) -> None:
    for seed in range(first, first + count):
        guard(batch(seed, **options))  # type: ignore[arg-type]


def drive_to_alarm(guard: Guard) -> None:
    before = len(guard.alarms)
    while len(guard.alarms) == before:
        drive(guard, 1, first=guard.batches)
