"""What is done to a photograph before a network gets it: resize, crop, and the normalisation that the network expects.

Checkpoints say it on a card of their own (timm's configuration, torchvision's transforms, Hugging Face's
preprocessor_config.json). Networks made by name carry it as `model.preprocessing`; a network of one's own may set it too.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from petal.errors import ModelError
from petal.models.normalize import Normalize, attach_normalize, find_normalize

INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")    # by Pillow's numbers
Sides = tuple[int, int]


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the network's input: resized, then the centre cut out.

    `resize` is the length of the shorter side, or (height, width); `crop` is (height, width); None leaves a step out. `mean`
    and `std` are the normalisation the network was trained with; in petal it is part of the network, which takes [0, 1].

    >>> Preprocessing(resize=40, crop=(32, 32)).size, Preprocessing(resize=40).size
    ((32, 32), None)
    """

    resize: int | Sides | None = None
    crop: Sides | None = None
    interpolation: str = "bilinear"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        sides = [*(self.resize if isinstance(self.resize, tuple) else [self.resize]), *(self.crop or ())]
        if any(side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 1) for side in sides):
            raise ModelError(f"resize and crop are pixels, 1 or more; got resize={self.resize!r}, crop={self.crop!r}")
        if self.interpolation not in INTERPOLATIONS:
            raise ModelError(f"interpolation is one of {', '.join(INTERPOLATIONS)}; got {self.interpolation!r}")
        if (self.mean is None) != (self.std is None):
            raise ModelError("mean and std belong together: give both or neither")

    @property
    def size(self) -> Sides | None:
        """(height, width) of what comes out, if it is the same for all pictures."""
        return self.crop or (self.resize if isinstance(self.resize, tuple) else None)

    def leaves(self, height: int, width: int) -> bool:
        """True if a picture of this size stays as it is."""
        resized = self.resize not in (None, min(height, width), (height, width))
        return not resized and self.crop in (None, (height, width))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Any) -> "Preprocessing":
        """From what `to_json` gave; a ModelError that says what is wrong with it otherwise."""
        names = set(cls.__dataclass_fields__)
        if not isinstance(content, Mapping) or not content.keys() <= names:
            raise ModelError(f"preprocessing is an object with {', '.join(sorted(names))}; got {content!r}")
        values: dict[str, Any] = {str(k): tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        pairs = [value for value in (values.get("resize"), values.get("crop")) if isinstance(value, tuple)]
        numbers = [n for name in ("mean", "std") for n in values.get(name) or ()]
        if any(len(pair) != 2 for pair in pairs) or not all(isinstance(n, (int, float)) for n in numbers):
            raise ModelError(f"preprocessing cannot be read: {content!r}")
        return cls(**values)


def preprocessing_of(model: nn.Module) -> Preprocessing | None:
    """What a network says of its input: `model.preprocessing`, or timm's configuration; None if it says nothing."""
    stated = getattr(model, "preprocessing", None)
    if isinstance(stated, Preprocessing):
        return stated
    config = getattr(model, "pretrained_cfg", None)
    return by_timm(config) if isinstance(config, Mapping) and config.get("input_size") else None


def with_normalisation(model: nn.Module, known: Preprocessing) -> Preprocessing:
    """The same with the normalisation that is part of the network, if there is one."""
    normalize = find_normalize(model)
    if normalize is None or normalize.mean is None or normalize.std is None:
        return known
    mean, std = (tuple(float(str(n)) for n in v.flatten().cpu().float().numpy()) for v in (normalize.mean, normalize.std))
    return replace(known, mean=mean, std=std)


def normalising(model: nn.Module, known: Preprocessing) -> nn.Module:
    """The network with this normalisation as a part of it, so that it takes [0, 1]; as it is where there is none."""
    if known.mean is None or known.std is None:
        return model
    device, found = next(model.parameters()).device, find_normalize(model)
    if found is None:
        return attach_normalize(model, known.mean, known.std).to(device)
    wanted = Normalize(known.mean, known.std).to(device)
    found.mean, found.std = wanted.mean, wanted.std
    return model


def by_name(name: str, side: int = 32) -> Preprocessing | None:
    """That of petal's own networks: small ones for pictures of 32 pixels, or what the network says, ImageNet's for 224."""
    if name == "resnet-50":
        return Preprocessing(256, (224, 224))
    small = name in ("resnext-29", "small", "small-gn", "vit-tiny") or re.fullmatch(r"wrn-\d+-\d+", name)
    return Preprocessing(side, (side, side)) if small else None


def by_timm(config: Mapping[str, Any]) -> Preprocessing | None:
    """By a configuration of timm; None if it cuts in a way that is not known here."""
    size = config.get("input_size")
    how, mode = config.get("interpolation") or "bicubic", config.get("crop_mode") or "center"
    if not size or mode not in ("center", "squash") or how not in INTERPOLATIONS:
        return None
    crop, share = (int(size[1]), int(size[2])), float(config.get("crop_pct") or 0.875)
    sides = math.floor(crop[0] / share), math.floor(crop[1] / share)
    mean, std = (tuple(config[key]) if config.get(key) else None for key in ("mean", "std"))
    return Preprocessing(sides[0] if mode == "center" and sides[0] == sides[1] else sides, crop, how, mean, std)


def by_torchvision(preset: Any) -> Preprocessing | None:
    """By the transforms of a torchvision checkpoint."""
    resize, crop = _sides(getattr(preset, "resize_size", None)), _sides(getattr(preset, "crop_size", None))
    how = str(getattr(getattr(preset, "interpolation", None), "value", "bilinear"))
    if resize is None or crop is None or how not in INTERPOLATIONS:
        return None
    return Preprocessing(resize, _pair(crop), how, tuple(preset.mean), tuple(preset.std))


def by_transformers(card: Mapping[str, Any]) -> Preprocessing | None:
    """By Hugging Face's preprocessor_config.json, as a dict."""
    size, crop = _edges(card.get("size")), _edges(card.get("crop_size"))
    number = card.get("resample")
    how = INTERPOLATIONS[number] if isinstance(number, int) and number < len(INTERPOLATIONS) else "bilinear"
    share = card.get("crop_pct")
    if share and isinstance(size, int):                     # ConvNeXt's: the size is that of the cut
        crop = (size, size)
        size = int(size / share) if size < 384 else (size, size)
        how = "bicubic" if "resample" not in card else how
    elif not card.get("do_center_crop", crop is not None):
        crop = None
    if not card.get("do_resize", True):
        size = None
    if size is None and crop is None:
        return None
    mean, std = (tuple(card[key]) if card.get(key) else None for key in ("image_mean", "image_std"))
    known = mean is not None and std is not None
    return Preprocessing(size, _pair(crop), how, mean if known else None, std if known else None)


def _sides(value: Any) -> int | Sides | None:
    """A side, or two, in the ways that libraries write them."""
    if isinstance(value, Sequence) and value:
        return int(value[0]) if len(value) == 1 else (int(value[0]), int(value[1]))
    return int(value) if isinstance(value, int) else None


def _edges(value: Any) -> int | Sides | None:
    if isinstance(value, Mapping):
        if "shortest_edge" in value:
            return int(value["shortest_edge"])
        return (int(value["height"]), int(value["width"])) if {"height", "width"} <= value.keys() else None
    if isinstance(value, int):
        return value, value
    return _sides(value)


def _pair(value: int | Sides | None) -> Sides | None:
    return (value, value) if isinstance(value, int) else value
