"""Networks of timm, torchvision and transformers, made to take pixels in [0, 1], and those of functions of one's own."""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import nn

from petal.errors import ModelError
from petal.models.normalize import IMAGENET_MEAN, IMAGENET_STD, attach_normalize
from petal.models.preprocessing import Preprocessing, by_timm, by_torchvision, by_transformers


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
    found = attach_normalize(model, mean or config.get("mean", IMAGENET_MEAN), std or config.get("std", IMAGENET_STD))
    return _with_card(found, by_timm(config))


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
    return _with_card(attach_normalize(model, mean or config["mean"], std or config["std"]), by_torchvision(preset))


def from_transformers(
    name: str,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pretrained: bool = True,
    **options: Any,
) -> nn.Module:
    """`AutoModelForImageClassification` from a folder or the hub, with its processor's normalisation built in.

    With `pretrained=False` only its configuration is used. For text and other inputs write a `package.module:function`.
    """
    library = _library("transformers", name)
    auto = library.AutoModelForImageClassification
    try:
        config = library.AutoConfig.from_pretrained(name, num_labels=classes, **options)
        card: dict[str, Any] = {}
        with suppress(OSError) if mean and std else nullcontext():
            card, _ = library.image_processing_base.ImageProcessingMixin.get_image_processor_dict(name)
        mean, std = mean or card["image_mean"], std or card["image_std"]
        model: nn.Module = auto.from_pretrained(name, config=config) if pretrained else auto.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"{type(error).__name__} {error}"
        raise ModelError(f"transformers:{name} cannot be made with {classes} classes: {what}") from error
    return _with_card(attach_normalize(model, mean, std), by_transformers(card))


def checkpoint_classes(name: str) -> tuple[int | None, tuple[str, ...] | None]:
    """How many classes the library's own checkpoint of a network has, and their names; None where the library does not say.

    >>> checkpoint_classes("wrn-40-2")
    (None, None)
    """
    library, _, inner = name.partition(":")
    names: tuple[str, ...] | None = None
    count = None
    if library == "torchvision":
        found = _library(library, inner).models.get_model_weights(inner).DEFAULT.meta.get("categories") or ()
        count, names = len(found) or None, tuple(found) or None
    elif library == "timm":
        config = _library(library, inner).get_pretrained_cfg(inner)
        count = getattr(config, "num_classes", None)
    elif library == "transformers":
        try:
            config = _library(library, inner).AutoConfig.from_pretrained(inner)
        except (OSError, ValueError) as error:
            raise ModelError(f"transformers:{inner} cannot be found: {error}") from error
        count = config.num_labels
        told = [str(config.id2label.get(number, "")) for number in range(count)]
        names = None if any(text in ("", f"LABEL_{n}") for n, text in enumerate(told)) else tuple(told)
    return count, names


def _with_card(model: nn.Module, card: Preprocessing | None) -> nn.Module:
    """The network with what its card says of pictures (`preprocessing_of`)."""
    if card is not None and not hasattr(model, "preprocessing"):
        model.preprocessing = card  # type: ignore[assignment]
    return model


def is_function(name: str) -> bool:
    """True if a network is named by a function that makes it, `package.module:function`.

    >>> is_function("mine.nets:resnet"), is_function("timm:resnet50"), is_function("small")
    (True, False, False)
    """
    return bool(re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name)) and name.partition(":")[0] not in LIBRARIES


def own_function(name: str) -> Callable[..., nn.Module]:
    """A function of the user's by its name, with `classes` left out if it takes none."""
    path, _, inner = name.partition(":")
    try:
        with _here():
            made: Any = importlib.import_module(path)
        for part in inner.split("."):
            made = getattr(made, part)
        signature = inspect.signature(made)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        known = ", ".join(f"{library}:NAME" for library in LIBRARIES)
        raise ModelError(
            f"there is no network {name!r}: as package.module:function it cannot be imported ({error}), and the libraries "
            f"are {known}"
        ) from error
    takes = any(p.name == "classes" or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    def make(classes: int, **options: Any) -> nn.Module:
        model = made(**({"classes": classes} if takes else {}), **options)
        if not isinstance(model, nn.Module):
            raise ModelError(f"{name} returned {type(model).__name__}: it is to return the network, a torch.nn.Module")
        return model

    kept = [p for p in signature.parameters.values() if p.name != "classes"]
    classes = inspect.Parameter("classes", inspect.Parameter.KEYWORD_ONLY)
    end = next((n for n, p in enumerate(kept) if p.kind is p.VAR_KEYWORD), len(kept))
    make.__signature__ = signature.replace(parameters=[*kept[:end], classes, *kept[end:]])  # type: ignore[attr-defined]
    return make


@contextmanager
def _here() -> Iterator[None]:
    """In here modules of the working directory can be imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))


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


LIBRARIES = {"timm": from_timm, "torchvision": from_torchvision, "transformers": from_transformers}
