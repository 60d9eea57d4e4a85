"""Networks by name."""

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from petal.errors import ModelError
from petal.models.libraries import LIBRARIES, is_function, own_function
from petal.models.preprocessing import by_name
from petal.models.resnet import ResNet
from petal.models.resnext import ResNeXt
from petal.models.small import SmallNet
from petal.models.vit import VisionTransformer
from petal.models.weights import load_weights
from petal.models.wide_resnet import WideResNet

#: name -> callable(classes=..., **options); add your own
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "wrn-28-10": partial(WideResNet, 28, 10),
    "wrn-40-2": partial(WideResNet, 40, 2),
    "resnext-29": ResNeXt,
    "resnet-50": ResNet,
    "small": SmallNet,
    "small-gn": partial(SmallNet, norm="group"),
    "vit-tiny": VisionTransformer,
}


def build(
    name: str, classes: int = 10, weights: str | Path | None = None, *, seed: int | None = None, **options: Any
) -> nn.Module:
    """Build a network that takes pixels in [0, 1], and load its weights.

    `name` is one of `NETWORKS`, `wrn-D-W` with any depth and width, `timm:NAME`, `torchvision:NAME`, `transformers:NAME`
    (a folder, or a model of the hub), or `package.module:function`, a function of your own that returns the network and is
    given `classes` if it takes that. Your module is imported, from the working directory too: name only what you trust.
    `weights` is a
    checkpoint file (see `load_weights`); without one the weights are random, drawn with `seed` if that is given and
    else from torch's global generator. `options` go to the network: `dropout`, `mean`, `std`, ...

    The network is in evaluation mode if it got weights, in training mode otherwise.

    >>> build("wrn-10-1", classes=5)(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ModelError(f"classes must be a positive whole number, not {classes!r}")
    make = _find(name)
    _check_options(name, make, options)
    with _seeded(seed):
        model = make(classes=classes, **options)
    card = by_name(name, getattr(model, "image_size", 32))
    if card is not None and not hasattr(model, "preprocessing"):
        model.preprocessing = card  # type: ignore[assignment]
    if weights is None:
        return model
    return load_weights(model, weights).eval()


def _find(name: str) -> Callable[..., nn.Module]:
    library, colon, inner = name.partition(":")
    if colon and library in LIBRARIES:
        return partial(LIBRARIES[library], inner)
    if is_function(name):
        return own_function(name)
    if name in NETWORKS:
        return NETWORKS[name]
    if match := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return partial(WideResNet, int(match[1]), int(match[2]))
    choices = [*NETWORKS, "wrn-D-W", *(f"{library}:NAME" for library in LIBRARIES), "package.module:function"]
    close = difflib.get_close_matches(name.lower().replace("_", "-"), NETWORKS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ModelError(f"there is no network {name!r}{hint} (choices: {', '.join(choices)})")


def _check_options(name: str, make: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    signature = inspect.signature(make)
    try:
        signature.bind(classes=0, **options)
    except TypeError as error:
        fixed = {"classes", *(make.keywords if isinstance(make, partial) else ())}
        taken = ", ".join(key for key in signature.parameters if key not in fixed) or "none"
        raise ModelError(f"{name}: {error}; its options are: {taken}") from error


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from the CPU generator as if freshly seeded, and leave it as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
