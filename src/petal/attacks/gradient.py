"""Attacks by gradients through the batch statistics: what the attacker's images do to the answers to others'."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from petal.attacks.scene import Scene
from petal.errors import ConfigError
from petal.functional import confidence, entropy
from petal.methods import Adapter
from petal.methods.mean_teacher import MeanTeacher
from petal.methods.network import logits_of
from petal.norm import BoundedNorm

Objective = Callable[[Tensor], Tensor]          # of a whole batch: one number, the larger the better for the attacker
CAP = 5.0                                       # of one image's cross-entropy: to do more harm to it is no use


@dataclass(frozen=True)
class Invade:
    """The distribution invading attack (Wu et al., 2023): projected gradient ascent on the error of the benign images.

    His images go as far as `eps` from honest ones, or anywhere. `knows` is "all": the weights of now and the images of the
    others with their labels; or "source": the weights before adaptation and images of his own in the others' place. `loss`
    is the cross-entropy, capped, or the "margin" of the right class. Where batch statistics are robust he ascends by their
    own gradient and, once more, by that of the plain mean, and sends what does more harm.
    """

    eps: float | None = 16 / 255
    steps: int = 20
    knows: str = "all"
    loss: str = "cross-entropy"
    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.knows not in ("all", "source") or self.loss not in ("cross-entropy", "margin"):
            got = f"{self.knows!r}, {self.loss!r}"
            raise ConfigError(f"knows is 'all' or 'source', loss 'cross-entropy' or 'margin'; got {got}")

    def images(self, scene: Scene) -> Tensor:
        """Images after the ascent."""
        x, y, benign = scene.x, scene.y, ~scene.where
        if self.knows == "source":
            place = torch.arange(len(x), device=x.device) % len(scene.own_x)
            x, y = scene.own_x[place].clone(), scene.own_y[place]
            x[scene.where] = scene.x[scene.where]
        if not bool(benign.any()):              # a batch that is all his: nobody else's answer is in it
            return x[scene.where]
        networks = answering(scene.method, self.knows)

        def harm(x: Tensor) -> Tensor:
            return torch.stack([self.harm(network(x)[benign], y[benign]) for network in networks]).mean()

        return ascended(harm, x, scene, self.eps, self.steps)

    def harm(self, logits: Tensor, y: Tensor) -> Tensor:
        """What the benign images' answers lose."""
        if self.loss == "cross-entropy":
            return F.cross_entropy(logits, y, reduction="none").clamp(max=CAP).mean()
        right = logits.gather(1, y[:, None])[:, 0]
        other = logits.scatter(1, y[:, None], -torch.inf).amax(1)
        return (other - right).clamp(max=CAP).mean()


@dataclass(frozen=True)
class Gate:
    """Images that open PETAL's gate, so that every batch costs its views, or close it: by what the source is sure of."""

    opens: bool = True
    eps: float | None = None
    steps: int = 20
    together: ClassVar[bool] = False

    def images(self, scene: Scene) -> Tensor:
        """Images after the ascent."""
        (network,) = answering(scene.method, "source")[:1]
        sign = -1.0 if self.opens else 1.0
        return ascended(lambda x: sign * confidence(network(x)).mean(), scene.x, scene, self.eps, self.steps)


@dataclass(frozen=True)
class Update:
    """Images by which the weights move as far as can be: the gradient of the entropy, or of PETAL's loss, is longest."""

    eps: float | None = None
    steps: int = 10
    together: ClassVar[bool] = False

    def images(self, scene: Scene) -> Tensor:
        """Images after the ascent."""
        method = scene.method
        parameters = list(method.adapted.values())
        if not parameters:
            return scene.x[scene.where]

        def length(x: Tensor) -> Tensor:
            logits = logits_of(method.model, x)
            target = logits_of(method.teacher, x) if isinstance(method, MeanTeacher) else logits
            loss = -(target.softmax(1) * logits.log_softmax(1)).sum(1) if target is not logits else entropy(logits)
            found = torch.autograd.grad(loss.mean(), parameters, create_graph=True, allow_unused=True)
            return torch.stack([g.square().sum() for g in found if g is not None]).sum().sqrt()

        return ascended(length, scene.x, scene, self.eps, self.steps)


def ascended(objective: Objective, x: Tensor, scene: Scene, eps: float | None, steps: int) -> Tensor:
    """The attacker's images [count, ...] after ascents on an objective of the batch, the best that were met.

    From his honest images and, if they may go anywhere, from grey ones too. Values stay in [0, 1] where those given do.
    """
    low, high = float(x.min().clamp(max=0)), float(x.max().clamp(min=1))
    start, best, most = x[scene.where], x[scene.where], -torch.inf
    starts = [start] if eps is not None else [(start + _noise(start, scene)).clamp(low, high)]
    robust = any(isinstance(layer, BoundedNorm) for layer in scene.method.modules())
    for straight in (False, True) if robust else (False,):
        for first in starts:
            with going_straight(scene.method, straight):
                found, value = _ascended(objective, x, scene.where, first, start, eps, steps, (low, high))
            if value > most:
                best, most = found, value
    return best


def _ascended(
    objective: Objective, x: Tensor, where: Tensor, first: Tensor, start: Tensor, eps: float | None, steps: int,
    span: tuple[float, float],
) -> tuple[Tensor, float]:  # fmt: skip
    width = span[1] - span[0] if eps is None else eps
    mine, best, most = first.clone(), first.clone(), -float("inf")
    for step in range(steps + 1):
        mine.requires_grad_(True)
        with torch.enable_grad():
            whole = x.detach().clone().index_put((where.nonzero().squeeze(1),), mine)
            value = objective(whole)
            (gradient,) = torch.autograd.grad(value, mine, allow_unused=True)
        mine, reached = mine.detach(), float(value.detach())
        if reached > most:
            best, most = mine.clone(), reached
        if gradient is None or step == steps:
            break
        mine = mine + width * (0.3 - 0.25 * step / steps) * gradient.nan_to_num().sign()
        if eps is not None:
            mine = torch.minimum(torch.maximum(mine, start - eps), start + eps)
        mine = mine.clamp(*span)
    return best, most


def _noise(like: Tensor, scene: Scene) -> Tensor:
    return (0.1 * torch.randn(like.shape, generator=scene.generator)).to(like)


def answering(method: Adapter, knows: str = "all") -> list[Callable[[Tensor], Tensor]]:
    """The networks that answer for a method, with gradients to what they are given; mirror images where it uses them."""
    if knows == "source":
        source = getattr(method, "source", None)
        if isinstance(method, MeanTeacher) and isinstance(source, nn.Module):
            return [partial(logits_of, source)]
        weights = method.origin()
        return [lambda x: logits_of(lambda given: functional_call(method.model, weights, (given,)), x)]
    networks: list[Callable[[Tensor], Tensor]] = [partial(logits_of, getattr(method, name)) for name in method.answered_by]
    flips = [name for name in getattr(method, "answer", ()) if name.endswith("-flip")]
    for name in flips:
        network = getattr(method, "teacher" if name.startswith("teacher") else "model")
        networks.append(lambda x, network=network: logits_of(network, x.flip(-1)))  # type: ignore[misc]
    return networks


@contextmanager
def going_straight(method: Adapter, straight: bool) -> Iterator[None]:
    """In here robust batch statistics have the gradient of the plain ones, if `straight`."""
    layers = [layer for layer in method.modules() if isinstance(layer, BoundedNorm)]
    try:
        for layer in layers:
            layer.straight = straight
        yield
    finally:
        for layer in layers:
            layer.straight = False
