"""Tiny networks for the tests: batch norm, group norm, and a transformer with odd parameter names."""

import inspect
from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn

import petal

CLASSES = 5
SIZE = 8


class ConvNet(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else (lambda c: nn.GroupNorm(2, c))
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = make(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.norm2 = make(12)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        return self.fc(self.dropout(x.mean((2, 3))))


class TinyViT(nn.Module):
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
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        normed = self.norm1(tokens)
        tokens = tokens + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head(self.norm2(tokens)[:, 0])


NETWORKS = {"batch-norm": lambda: ConvNet("batch"), "group-norm": lambda: ConvNet("group"), "vit": TinyViT}


def network(name: str = "batch-norm", dtype: torch.dtype = torch.float32) -> nn.Module:
    """The named network with the same weights every time, its predictions spread out and its statistics set."""
    return deepcopy(_made(name)).to(dtype)


@cache
def _made(name: str) -> nn.Module:
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name]()
        model.train()
        for _ in range(20):
            model(images(32, seed=int(torch.randint(1000, ()))))
        with torch.no_grad():
            last = model.head if name == "vit" else model.fc
            last.weight.mul_(8)
    return model.eval()


def images(count: int = 12, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 3, 3, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=SIZE, mode="bilinear")
    return (smooth + 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator)).clamp(0, 1).to(dtype)


def statistics(model: nn.Module) -> petal.SourceStatistics:
    """Source statistics of a network by its own labels, as a method with a parameter of this name is given."""
    like = next(model.parameters())
    first = next(layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear)))
    batches = [images(24, s) if isinstance(first, nn.Conv2d) else torch.rand(24, first.in_features) for s in (90, 91)]
    return petal.collect_statistics(model, [x.to(like) for x in batches], labels="predicted")


def needed(method: str, model: nn.Module) -> list[petal.SourceStatistics]:
    """The statistics, if the constructor of a method takes them: what it is given after the network."""
    return [statistics(model)] if "statistics" in inspect.signature(petal.METHODS[method]).parameters else []
