"""What an experiment reads or makes first: images, source network, posterior, source statistics."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from petal import models
from petal.data import KINDS, CorruptedDataset, Dataset, open_dataset
from petal.errors import ConfigError, DataError
from petal.models.preprocessing import Preprocessing, with_normalisation
from petal.posterior import DiagonalGaussian, LowRankGaussian
from petal.posterior import load_posterior as read_posterior
from petal.recipes.fit import TrainProgress, collect_into, fit
from petal.recipes.published import Recipe
from petal.source_folder import CONFIG, SourceConfig, check_config, read_config, write_config
from petal.statistics import PARTS, SourceStatistics
from petal.swag import FitProgress


def open_test(recipe: Recipe, data: str | None, corrupted: str | None, ids: str | Path | None) -> Dataset:
    """The images to adapt to: clean ones, which are corrupted on the fly, or the published -C files."""
    if data is not None and corrupted is not None:
        raise ConfigError("give --data (clean images, or a -C folder) or --corrupted (a -C folder), not both")
    path = data or corrupted
    if path is None:
        if not recipe.builtin:
            raise ConfigError(f"{recipe.name} needs images: give --data or --corrupted, {recipe.data}")
        path = "digits"
    options: dict[str, Any] = {}
    kind = _kind(path)
    if kind == "image-folder":
        options["size"] = 224
    if ids is not None:
        if kind not in ("imagenet-c", "imagenet-3dcc"):
            raise ConfigError("--ids is a list of images of an ImageNet-C or ImageNet-3DCC folder")
        options["ids"] = Path(ids)
    dataset = open_dataset(path, **options)
    if corrupted is not None and not isinstance(dataset, CorruptedDataset):
        raise DataError(f"{corrupted} holds clean images, not the published -C files; give it as --data")
    return dataset


def open_train(path: str) -> Dataset:
    """The training images at a path."""
    kind = _kind(path)
    if path == "digits":
        return open_dataset("digits:train")
    if kind == "cifar":
        return open_dataset(path, split="train")
    return open_dataset(path, size=224) if kind == "image-folder" else open_dataset(path)


def are_photographs(path: str) -> bool:
    """True if the images at a path are resized to 256 and cut to 224 when they are read."""
    return _kind(path) == "image-folder"


def _kind(path: str) -> str | None:
    return next((name for name, known in KINDS.items() if Path(path).exists() and known.fits(Path(path))), None)


def make_source(
    recipe: Recipe, folder: Path, device: torch.device, on_train: Callable[[TrainProgress], None] | None = None,
    on_swag: Callable[[FitProgress], None] | None = None,
) -> tuple[Path, Path, Path]:  # fmt: skip
    """Network, posterior and statistics of a recipe whose data comes with the package: made unless they are in `folder`."""
    network, posterior, statistics = (folder / f"{name}.safetensors" for name in ("network", "posterior", "statistics"))
    data, options = open_dataset("digits:train"), recipe.network_options
    if not (folder / "fit.json").is_file() or not network.is_file() or not posterior.is_file():
        model = models.build(recipe.network, recipe.classes, seed=0, **options).to(device)
        fit(model, data, recipe.fit, folder, test=open_dataset("digits:test"), on_train=on_train, on_swag=on_swag,
            source=describe_source(model, data, recipe.network, recipe.classes, options, names="0123456789"))  # fmt: skip
    if not statistics.is_file():
        model = models.build(recipe.network, recipe.classes, network, **options).to(device)
        collect_into(statistics, model, data, PARTS, recipe.batch_size)
        if (folder / CONFIG).is_file():
            write_config(read_config(folder))
    return network, posterior, statistics


def describe_source(
    model: nn.Module, data: Dataset, network: str, classes: int, options: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None, photographs: bool = False,
) -> SourceConfig:  # fmt: skip
    """What config.json is to say of a network fitted on this data; `photographs` were resized to 256 and cut to 224."""
    shape = tuple(data.batch([0])[0].shape[1:])
    sides = shape[1], shape[2]
    card = Preprocessing(256 if photographs else sides[0], sides)
    names = names or data.classes
    known = names is not None and len(names) == classes
    config = SourceConfig(Path(), network, classes, dict(options or {}), shape, with_normalisation(model, card),
                          tuple(names) if names is not None and known else None)  # fmt: skip
    check_config(config)
    return config


def load_posterior(path: str | Path | None, model: nn.Module) -> DiagonalGaussian | LowRankGaussian | None:
    """The posterior at a path, checked against the network."""
    if path is None:
        return None
    q = read_posterior(path)
    q.check(model)
    return q


def load_statistics(path: str | Path | None, model: nn.Module) -> SourceStatistics | None:
    """The source statistics at a path, checked against the network."""
    if path is None:
        return None
    found = SourceStatistics.load(path)
    found.check(model)
    like = next(model.parameters())
    return found.to(like.device, like.dtype)


def fit_threads(recipe: Recipe | None) -> None:
    """One thread for the small network of a built-in recipe: a second one costs it more than it saves.

    It also makes the source network the same everywhere: sums over several threads are rounded differently.
    """
    if recipe is not None and recipe.builtin:
        torch.set_num_threads(1)
