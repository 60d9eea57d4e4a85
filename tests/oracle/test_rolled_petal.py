"""`oracle.rolled_petal` is PETAL: in float64 its steps are the same, and it does roll."""

import importlib

import pytest
import torch
from torch import Tensor

import petal
from networks import images, network


def test_the_same_steps_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(petal, "METHODS", dict(petal.METHODS))  # the plugin's own methods are for those who ask for them
    plugin = importlib.import_module("oracle.rolled_petal")
    model = network(dtype=torch.float64)
    q = petal.DiagonalGaussian.isotropic(model, std=0.1)
    seen: list[Tensor] = []

    def view(x: Tensor) -> Tensor:
        seen.append(x)
        return (x.roll(1, -1) * 0.9).clamp(0, 1)

    settings = {"views": 2, "confidence": 2.0, "augment": view}
    plain = petal.Petal(model, q, gate="batch", average="logits", **settings)
    rolled = plugin.RolledPetal(model, q, **settings)
    for seed in range(3):
        x = images(12, seed=seed, dtype=torch.float64)
        assert torch.allclose(plain(x), rolled(x), atol=1e-9)
        assert torch.equal(seen[-1], x.roll(1, 0))
    for a, b in zip(plain.model.parameters(), rolled.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-9)
