"""Tiny networks to check a method on: batch norm, group norm, and a transformer with parameters of its own names."""

from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn

CLASSES = 5
SIZE = 8
NETWORKS = ("batch-norm", "group-norm", "vit")


class ConvNet(nn.Module):
    """Two convolutions, each with a normalisation, and a linear layer."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = _norm(norm, 8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.norm2 = _norm(norm, 12)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 5] of images [N, 3, 8, 8]."""
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        logits: Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits


class TinyViT(nn.Module):
    """One block of attention over four patches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 5] of images [N, 3, 8, 8]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        normed = self.norm1(tokens)
        tokens = tokens + self.attention(normed, normed, normed, need_weights=False)[0]
        logits: Tensor = self.head(self.norm2(tokens)[:, 0])
        return logits


def network(name: str = "batch-norm", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of the network of this name: the same weights every time, its predictions spread out, its statistics set."""
    return deepcopy(_made(name)).to(dtype)


def networks() -> dict[str, nn.Module]:
    """The three networks by their names.

    >>> {name: model(images(2)).shape for name, model in networks().items()}["vit"]
    torch.Size([2, 5])
    """
    return {name: network(name) for name in NETWORKS}


def images(count: int = 12, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Smooth random images [count, 3, 8, 8] with some noise, values in [0, 1]."""
    return _drawn(count, seed).to(dtype, copy=True)


@cache
def _drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 3, 3, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=SIZE, mode="bilinear")
    return (smooth + 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator)).clamp(0, 1)


@cache
def _made(name: str) -> nn.Module:
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = TinyViT() if name == "vit" else ConvNet(name)
        model.train()
        for _ in range(20):
            model(images(32, seed=int(torch.randint(1000, ()))))
        last = model.head if isinstance(model, TinyViT) else model.fc
        last.weight.mul_(8)
    return model.eval()


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch-norm" else nn.GroupNorm(2, channels)
