"""What an attacker sees of a batch, and what an attack is."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petal.errors import ConfigError
from petal.methods import Adapter, Wrapper


@dataclass(frozen=True, eq=False)
class Scene:
    """One batch with places that are the attacker's.

    x [N, ...] and y [N] as honest people would have sent them; `where` [N] marks the attacker's places. `own_x`, `own_y` are
    images that the attacker has himself: those of his places, in this batch and before. `victim` is the adapter as it is
    now, for attacks that know it.
    """

    x: Tensor
    y: Tensor
    where: Tensor
    own_x: Tensor
    own_y: Tensor
    victim: Adapter | None
    generator: torch.Generator              # on the CPU: the same for every device

    @property
    def count(self) -> int:
        """How many images the attacker sends."""
        return int(self.where.sum())

    @property
    def method(self) -> Adapter:
        """The method that is attacked, whatever goes around it."""
        if self.victim is None:
            raise ConfigError("this attack is made against an adapter: give it as victim=")
        return self.victim.method if isinstance(self.victim, Wrapper) else self.victim

    def chosen(self, labels: Tensor) -> Tensor:
        """`count` images out of those marked [own] among the attacker's, each as often as the others."""
        found = labels.nonzero().squeeze(1)
        return self.own_x[found[torch.arange(self.count, device=found.device) % len(found)]]


class Attack(Protocol):
    """Makes the images that an attacker sends."""

    @property
    def together(self) -> bool:
        """They come in a row at the beginning of a batch, not spread over it."""
        ...

    def images(self, scene: Scene) -> Tensor:
        """The attacker's images [count, ...] of a batch."""
        ...
