"""Every setting of Adam and SGD means on the engine what it means to torch."""

import pytest
import torch
from torch import nn

import petal
from networks import images, network
from petal.engine import Policy

SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"weight_decay": 0.5}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.5}),
    (torch.optim.Adam, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_one_setting(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> None:
    """Views of all batches, so that the gradient is far from rounding noise; and no restore, which flips near its limit."""

    def adapter(engine: str) -> petal.Adapter:
        model = network()
        made = petal.CoTTA(model, lr=1e-2, ema=0.5, views=2, confidence=2.0, restore=None,
                           augment=lambda x: (x * 0.5).flip(-1), optimizer=build)  # fmt: skip
        return petal.accelerate(made, engine, policy=Policy())

    def build(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return kind(parameters, lr=lr, **settings)  # type: ignore[call-arg]

    plain, fast = adapter("eager"), adapter("auto")
    for seed in range(3):
        expected, got = plain(images(seed=seed)), fast(images(seed=seed))
        assert torch.allclose(expected, got, atol=1e-4), (expected - got).abs().max()
    start = plain.origin()
    for name, p in plain.adapted.items():
        moved = (p - start[name]).norm()
        assert moved > 1e-4
        assert (fast.adapted[name] - p).norm() < 1e-2 * moved, name
