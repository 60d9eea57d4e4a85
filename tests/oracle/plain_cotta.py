"""CoTTA and its views written a second time, as plainly as they can be said, to run beside the library's on any stream:

    petal run cifar10 --plugin tests/oracle/plain_cotta.py -m cotta -m plain-cotta --engine eager ...

Of `petal` it has the interface of a method alone.
"""

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, grid_sample, pad

import petal


class PlainCoTTA(petal.Adapter):
    def __init__(
        self, model: nn.Module, lr: float = 1e-3, ema: float = 0.999, views: int = 32, confidence: float = 0.92,
        restore: float = 0.01, augment=None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model, batch_statistics=True, seed=seed)
        self.adapt(dict(self.model.named_parameters()), lr)
        self.teacher, self.source = (deepcopy(self.model).requires_grad_(False) for _ in range(2))
        self.ema, self.views, self.confidence, self.restore = ema, views, confidence, restore
        self.augment = augment or (lambda x: view(x, self.generator))

    def prediction(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.views_used = bool(self.source(x).softmax(1).max(1).values.mean() < self.confidence)
            if not self.views_used:
                return self.teacher(x)
            return torch.stack([self.teacher(self.augment(x)) for _ in range(self.views)]).mean(0)

    def step(self, x: Tensor) -> Tensor:
        student = self.model(x)
        target = self.prediction(x)
        loss = -(target.softmax(1) * student.log_softmax(1)).sum(1).mean(0)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for t, s, o in zip(*(n.parameters() for n in (self.teacher, self.model, self.source)), strict=True):
                t.copy_(self.ema * t + (1 - self.ema) * s)
                mask = (torch.rand(s.shape, generator=self.generator, device=s.device) < self.restore).to(s.dtype)
                s.copy_(o * mask + s * (1 - mask))
        return target

    def _weights(self) -> dict[str, Tensor]:
        return super()._weights() | {f"teacher.{name}": p for name, p in self.teacher.named_parameters()}

    def _restore_initial(self) -> None:
        for network in (self.model, self.teacher):
            network.load_state_dict(self.source.state_dict())


def view(x: Tensor, generator: torch.Generator) -> Tensor:
    """One view of the batch, by one draw for all of its images."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, device=x.device))

    size, half = x.shape[-1], x.shape[-1] // 2
    light, contrast, colour = between(0.6, 1.4), between(0.7, 1.3), between(0.5, 1.5)
    turn, gamma = between(-0.06, 0.06), between(0.7, 1.3)
    changes = [
        lambda x: x * light,
        lambda x: contrast * x + (1 - contrast) * grey(x).mean((-3, -2, -1), keepdim=True),
        lambda x: colour * x + (1 - colour) * grey(x),
        lambda x: turned(x, turn),
        lambda x: x**gamma,
    ]
    x = x.clamp(0, 1)
    for number in torch.randperm(5, generator=generator, device=x.device).tolist():
        x = changes[number](x).clamp(0, 1)
    x = pad(x, (half,) * 4, mode="replicate")
    shift = [round(x.shape[-1] * between(-1 / 16, 1 / 16)) for _ in "xy"]
    x = moved(x, math.radians(between(-15, 15)), between(0.9, 1.1), shift)
    x = blurred(x, between(0.001, 0.5))[..., half : half + size, half : half + size]
    if between(0, 1) < 0.5:
        x = x.flip(-1)
    return (x + 0.005 * torch.randn(x.shape, generator=generator, device=x.device)).clamp(0, 1)


def grey(x: Tensor) -> Tensor:
    return (x * x.new_tensor([0.2989, 0.587, 0.114]).view(3, 1, 1)).sum(-3, keepdim=True)


def turned(x: Tensor, turn: float) -> Tensor:
    """The hue moved on by a share of the circle."""
    red, green, blue = x.unbind(1)
    top, low = x.max(1).values, x.min(1).values
    width = (top - low).clamp(min=1e-12)
    sector = torch.where(top == green, (blue - red) / width + 2, (red - green) / width + 4)
    sector = (torch.where(top == red, (green - blue) / width, sector) + 6 * turn) % 6

    def channel(number: int) -> Tensor:
        k = (number + sector) % 6
        return top - (top - low) * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


def moved(x: Tensor, angle: float, scale: float, shift: list[int]) -> Tensor:
    """Turned about the middle, scaled and shifted; outside is black."""
    middle = (x.shape[-1] - 1) / 2
    place = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) - middle
    down, right = torch.meshgrid(place - shift[1], place - shift[0], indexing="ij")
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    where = torch.stack([cos * right + sin * down, cos * down - sin * right], -1) * (2 / x.shape[-1])
    return grid_sample(x, where.expand(len(x), -1, -1, -1), align_corners=False)


def blurred(x: Tensor, sigma: float) -> Tensor:
    weights = torch.exp(-0.5 * (torch.arange(-2, 3, device=x.device, dtype=x.dtype) / sigma) ** 2)
    weights = weights / weights.sum()
    kernel = (weights[:, None] * weights).expand(x.shape[1], 1, 5, 5)
    return conv2d(pad(x, (2, 2, 2, 2), mode="reflect"), kernel, groups=x.shape[1])


petal.METHODS["plain-cotta"] = PlainCoTTA
