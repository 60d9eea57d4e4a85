"""Rows of the methods of the field, with the settings of their authors for each benchmark."""

from typing import Any, TypeVar

from petal.methods import METHODS
from petal.recipes.published import Recipe
from petal.recipes.row import Row

V = TypeVar("V")


def field(recipe: Recipe) -> list[Row]:
    """One row for each method that is not of PETAL's own tables."""

    def by_benchmark(cifar10: V, cifar100: V, imagenet: V) -> V:
        """The value for this recipe's kind of benchmark: ImageNet, CIFAR-100, or CIFAR-10 and all others."""
        return imagenet if recipe.classes == 1000 else cifar100 if recipe.classes == 100 else cifar10

    affine: dict[str, Any] = {"lr": recipe.affine_lr, "optimizer": recipe.affine_optimizer}
    del affine
    return [
        _row("rotta", augment=recipe.augment),
        _row("lame"),
        _row("note"),
        _row("petta", augment=recipe.augment, loss=by_benchmark("symmetric", "symmetric", "cross-entropy")),
    ]


def _row(method: str, **options: Any) -> Row:
    """The row of a method, named by its card."""
    card = METHODS[method].card
    assert card is not None, f"{method} has no card"
    return Row(method, card.title, method, options, random=card.random)
