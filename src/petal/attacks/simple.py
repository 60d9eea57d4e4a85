"""Attacks that need no gradients: pictures, repeated images, values out of range, floods of a class."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from petal.attacks.scene import Scene
from petal.errors import ConfigError, InputError

PICTURES = ("white", "black", "stripes", "checkerboard")


@dataclass(frozen=True)
class Honest:
    """No attack: his images are like all others. What errors under attack are compared with."""

    together: ClassVar[bool] = False

    def images(self, scene: Scene) -> Tensor:
        """The images as they are."""
        return scene.x[scene.where]


@dataclass(frozen=True)
class Picture:
    """One made picture, the same every time; stripes and squares are `period` pixels wide."""

    kind: str = "white"
    period: int = 1
    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind not in PICTURES or self.period < 1:
            got = f"{self.kind!r}, {self.period}"
            raise ConfigError(f"a picture is one of {', '.join(PICTURES)}, of a period from 1; got {got}")

    def images(self, scene: Scene) -> Tensor:
        """The picture, as often as wanted."""
        if scene.x.dim() != 4:
            raise InputError(f"pictures are sent among images [N, C, H, W], not {list(scene.x.shape)}")
        height, width = scene.x.shape[2:]
        down, right = (torch.arange(n, device=scene.x.device) // self.period for n in (height, width))
        values = {
            "white": torch.ones(height, width), "black": torch.zeros(height, width),
            "stripes": (right % 2).expand(height, width), "checkerboard": (down[:, None] + right) % 2,
        }[self.kind]  # fmt: skip
        return values.to(scene.x).expand(scene.count, *scene.x.shape[1:]).clone()


@dataclass(frozen=True)
class Repeat:
    """The first image that the attacker had, again and again."""

    together: ClassVar[bool] = False

    def images(self, scene: Scene) -> Tensor:
        """The image, as often as wanted."""
        return scene.own_x[:1].expand(scene.count, *scene.x.shape[1:]).clone()


@dataclass(frozen=True)
class Outside:
    """The attacker's images with values `times` as large as they can be."""

    times: float = 1e4
    together: ClassVar[bool] = False

    def images(self, scene: Scene) -> Tensor:
        """His images of this batch, out of range."""
        return scene.x[scene.where] * self.times


@dataclass(frozen=True)
class Flood:
    """Honest images of one class alone, that of the first image he had. With `in_a_row` others follow on a run of them."""

    in_a_row: bool = False

    @property
    def together(self) -> bool:
        """As it is said."""
        return self.in_a_row

    def images(self, scene: Scene) -> Tensor:
        """The images of the class that he has, in turn."""
        return scene.chosen(scene.own_y == scene.own_y[0])
