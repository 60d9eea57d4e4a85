"""A small network that knows clean digits, and digits of a domain to adapt to: made in seconds, once a run."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import petal
from petal.data import digits


@cache
def source() -> dict[str, Tensor]:
    """A small network that knows clean digits, in seconds."""
    x, y = digits("train").batch(range(1000))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = petal.models.build("small", 10, seed=0, width=8).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(6):
            for part in torch.randperm(1000).split(50):
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
    return model.state_dict()


def model() -> nn.Module:
    network = petal.models.build("small", 10, width=8)
    network.load_state_dict(source())
    return network.eval()


@cache
def images() -> tuple[Tensor, Tensor]:
    """Dark digits with noise: a domain to adapt to."""
    x, y = digits("test").batch(range(797))
    noise = 0.15 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return (0.5 * x + 0.2 + noise).clamp(0, 1), y
