"""Networks of timm and torchvision, when those are installed, made to take pixels in [0, 1]."""

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from petal.errors import ModelError
from petal.models.normalize import IMAGENET_MEAN, IMAGENET_STD, attach_normalize


def from_timm(
    name: str, classes: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None, **options: Any
) -> nn.Module:
    """`timm.create_model(name, num_classes=classes, **options)` with its configuration's normalisation built in."""
    timm = _library("timm", name)
    known = list(timm.list_models())
    # "resnet50.a1_in1k" names an architecture and its weights; "hf_hub:..." is left to timm
    if ":" not in name and name.partition(".")[0] not in known:
        raise _unknown("timm", name, known)
    model: nn.Module = timm.create_model(name, num_classes=classes, **options)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return attach_normalize(model, mean or config.get("mean", IMAGENET_MEAN), std or config.get("std", IMAGENET_STD))


def from_torchvision(
    name: str,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """`torchvision.models.get_model(name, num_classes=classes, **options)` with its weights' normalisation built in."""
    models = _library("torchvision", name).models
    known = list(models.list_models())
    if name not in known:
        raise _unknown("torchvision", name, known)
    weights = models.get_model_weights(name).DEFAULT
    model: nn.Module = models.get_model(name, weights=weights if pretrained else None, num_classes=classes, **options)
    preset: Any = weights.transforms()
    config = {"mean": getattr(preset, "mean", IMAGENET_MEAN), "std": getattr(preset, "std", IMAGENET_STD)}
    return attach_normalize(model, mean or config["mean"], std or config["std"])


def _library(library: str, name: str) -> Any:
    try:
        return importlib.import_module(library)
    except (ImportError, RuntimeError, OSError) as error:  # a build for another torch fails with any of these
        raise ModelError(
            f"{library}:{name} needs {library}, which cannot be imported ({error}); `pip install {library}`, in the "
            "build that belongs to your torch"
        ) from error


def _unknown(library: str, name: str, known: list[str]) -> ModelError:
    close = difflib.get_close_matches(name, known, n=5)
    return ModelError(f"{library} has no network {name!r}" + (f"; close: {', '.join(close)}" if close else ""))


LIBRARIES = {"timm": from_timm, "torchvision": from_torchvision}
