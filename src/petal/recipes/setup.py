"""What a run needs, from names and paths: data, source network, posterior; and all of it as one plain value."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from petal import models
from petal.data import KINDS, CorruptedDataset, Dataset, open_dataset
from petal.errors import ConfigError, DataError
from petal.posterior import DiagonalGaussian
from petal.recipes.fit import TrainProgress, fit
from petal.recipes.published import Recipe, recipe
from petal.recipes.run import Bench
from petal.swag import FitProgress


@dataclass(frozen=True)
class Setup:
    """Names and paths from which any process makes the same `Bench`."""

    recipe: str
    data: str | None = None
    corrupted: str | None = None
    ids: str | None = None
    weights: str | None = None
    posterior: str | None = None
    network: str | None = None
    fidelity: str = "official"
    severity: int | None = None
    batch_size: int | None = None
    images: int | None = None
    engine: str = "auto"
    plugin: str | None = None
    visits: int | None = None
    label_correlation: float | None = None

    @property
    def chosen(self) -> Recipe:
        """The recipe, with the network that was asked for."""
        found = recipe(self.recipe)
        return found if self.network is None else replace(found, network=self.network, network_options={})

    def with_source(self, folder: Path, device: torch.device) -> "Setup":
        """The same with a source network: that of a built-in recipe is made in `folder` unless it is there."""
        if not self.chosen.builtin or self.weights is not None or self.network is not None:
            return self
        weights, posterior = make_source(self.chosen, folder, device)
        return replace(self, weights=str(weights), posterior=self.posterior or str(posterior))

    def bench(self, device: torch.device) -> Bench:
        """Read everything."""
        chosen = self.chosen
        images = open_test(chosen, self.data, self.corrupted, None if self.ids is None else Path(self.ids))
        model = source_network(chosen, None if self.weights is None else Path(self.weights), device)
        posterior = load_posterior(None if self.posterior is None else Path(self.posterior), model)
        return Bench(
            chosen, images, model, posterior, self.fidelity, self.severity, self.batch_size, self.images, self.engine,
            self.visits, self.label_correlation,
        )  # fmt: skip


def open_test(recipe: Recipe, data: str | None, corrupted: str | None, ids: Path | None) -> Dataset:
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
        options["ids"] = ids
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


def _kind(path: str) -> str | None:
    return next((name for name, known in KINDS.items() if Path(path).exists() and known.fits(Path(path))), None)


def source_network(recipe: Recipe, weights: Path | None, device: torch.device) -> nn.Module:
    """The recipe's network with these weights, on a device."""
    if weights is None:
        raise ConfigError(
            f"{recipe.name} needs the source network ({recipe.network}): give --weights, or make it with `petal fit "
            f"--recipe {recipe.name}`"
        )
    return models.build(recipe.network, recipe.classes, weights, **recipe.network_options).to(device)


def make_source(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    on_train: Callable[[TrainProgress], None] | None = None,
    on_swag: Callable[[FitProgress], None] | None = None,
) -> tuple[Path, Path]:
    """Network and posterior of a recipe whose data comes with the package, in `folder`: made unless they are there."""
    network, posterior = folder / "network.safetensors", folder / "posterior.safetensors"
    if not (folder / "fit.json").is_file() or not network.is_file() or not posterior.is_file():
        model = models.build(recipe.network, recipe.classes, seed=0, **recipe.network_options).to(device)
        fit(model, open_dataset("digits:train"), recipe.fit, folder, test=open_dataset("digits:test"),
            on_train=on_train, on_swag=on_swag)  # fmt: skip
    return network, posterior


def load_posterior(path: Path | None, model: nn.Module) -> DiagonalGaussian | None:
    """The posterior at a path, checked against the network."""
    if path is None:
        return None
    q = DiagonalGaussian.load(path)
    q.check(model)
    return q
