"""Rows of the methods of the field, with the settings of their authors for each benchmark."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from petal.methods import METHODS
from petal.recipes.published import Recipe
from petal.recipes.row import Row
from petal.recipes.settings import SGD

V = TypeVar("V")


def field(recipe: Recipe) -> list[Row]:
    """One row for each method that is not of PETAL's own tables."""

    def by_benchmark(cifar10: V, cifar100: V, imagenet: V) -> V:
        """The value for this recipe's kind of benchmark: ImageNet, CIFAR-100, or CIFAR-10 and all others."""
        return imagenet if recipe.classes == 1000 else cifar100 if recipe.classes == 100 else cifar10

    affine: dict[str, Any] = {"lr": recipe.affine_lr, "optimizer": recipe.affine_optimizer}
    like = by_benchmark(0.4, 0.1, 0.05)                                # EATA's threshold of similarity
    momentum = SGD(momentum=0.9)                                        # SAR's optimizer everywhere, in all released code
    calibrated = {"answer": "calibrated"}       # what NLL, Brier score and calibration error compare
    return [
        _row("eta", **affine, similarity=like),
        _row("eata", **affine, similarity=like, fisher_weight=by_benchmark(1.0, 1.0, 2000.0)),
        _row("rdumb", **affine, similarity=by_benchmark(0.4, 0.4, 0.05)),   # the collection's: not that of ETA
        _row("rpl", lr=by_benchmark(1e-3, 1e-3, 5e-4), optimizer=recipe.affine_optimizer),
        _row("sar", lr=recipe.affine_lr, optimizer=momentum),
        _row("deyo", **affine),
        Row("come", "COME", "tent", {**affine, "loss": "come"}, frozenset({"loss"}), random=False),
        Row("eata-come", "EATA + COME", "eata", {**affine, "similarity": like, "loss": "come",
            "fisher_weight": by_benchmark(1.0, 1.0, 2000.0)}, frozenset({"loss"}), random=False),
        Row("sar-come", "SAR + COME", "sar", {"lr": recipe.affine_lr, "optimizer": momentum, "loss": "come"},
            frozenset({"loss"}), random=False),
        _row("roid", **affine),
        _row("cmf", **affine),
        _variant("roid-plain", _row("roid", **affine), {"consistency": False, "answer": "logits"}, "plain"),
        _variant("roid-calibrated", _row("roid", **affine), calibrated),
        _variant("cmf-calibrated", _row("cmf", **affine), calibrated),
        _row("rotta", augment=recipe.augment),
        _row("lame"),
        _row("note"),
        _row("petta", augment=recipe.augment, loss=by_benchmark("symmetric", "symmetric", "cross-entropy")),
    ]  # fmt: skip


def _variant(name: str, row: Row, own: Mapping[str, Any], called: str = "") -> Row:
    """A row of the same method that differs in these options."""
    label = f"{row.label} ({called or ', '.join(map(str, own.values()))})"
    return replace(row, name=name, label=label, options={**row.options, **own}, own=frozenset(own))


def _row(method: str, **options: Any) -> Row:
    """The row of a method, named by its card."""
    card = METHODS[method].card
    assert card is not None, f"{method} has no card"
    return Row(method, card.title, method, options, random=card.random)
