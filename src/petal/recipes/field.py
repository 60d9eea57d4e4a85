"""Rows of the methods of the field, with the settings of their authors for each benchmark."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from petal.augment import AugMix
from petal.methods import METHODS
from petal.recipes.published import Recipe
from petal.recipes.row import Row
from petal.recipes.settings import SGD, Adam

V = TypeVar("V")


def field(recipe: Recipe) -> list[Row]:
    """One row for each method that is not of PETAL's own tables."""

    def by_benchmark(cifar10: V, cifar100: V, imagenet: V) -> V:
        """The value for this recipe's kind of benchmark: ImageNet, CIFAR-100, or CIFAR-10 and all others."""
        return imagenet if recipe.classes == 1000 else cifar100 if recipe.classes == 100 else cifar10

    affine: dict[str, Any] = {"lr": recipe.affine_lr, "optimizer": recipe.affine_optimizer}
    like = by_benchmark(0.4, 0.1, 0.05)                                # EATA's threshold of similarity
    momentum = SGD(momentum=0.9)                                        # SAR's optimizer everywhere, in all released code
    whole: dict[str, Any] = {"lr": recipe.lr, "optimizer": recipe.optimizer, "augment": recipe.augment}
    flip = 0.5 if recipe.augment is None else recipe.augment.flip
    obao = _row("obao", **whole, margin=by_benchmark(0.1, 0.1, 0.2), memory=by_benchmark(1000, 200, 1000),
                memory_batch=by_benchmark(200, 200, 64), replay=by_benchmark(1.0, 1.0, 0.5),
                relation=by_benchmark(1.0, 200.0, 1.0))
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
        _variant("roid-plain", _row("roid", **affine), {"consistency": 0.0, "answer": "logits"}, "plain"),
        _variant("roid-calibrated", _row("roid", **affine), calibrated),
        _variant("cmf-calibrated", _row("cmf", **affine), calibrated),
        _row("rmt", **whole),
        _row("santa", **whole),
        _variant("rmt-calibrated", _row("rmt", **whole), calibrated),
        obao,
        _variant("obao-calibrated", obao, calibrated),
        _variant("obao-weights", obao, {"prototypes": "weights"}),
        _row("gold", lr=recipe.lr, rank=by_benchmark(64, 64, 256), share=by_benchmark(0.1, 0.1, 0.02),
             contrast=by_benchmark(1.0, 1.0, 2.0), adapts=by_benchmark("weights", "weights", "norm"),
             augment=recipe.augment),
        _row("memo", lr=by_benchmark(5e-3, 5e-3, 2.5e-4), views=by_benchmark(32, 32, 64),
             augment=AugMix(flip=flip, crop=by_benchmark(None, None, (0.08, 1.0)))),
        _row("palm", lr=by_benchmark(5e-4, 5e-4, 5e-5), threshold=by_benchmark(1.0, 0.5, 0.3),
             temperature=by_benchmark(50.0, 100.0, 1000.0), momentum=by_benchmark(0.5, 0.1, 0.5),
             margin=0.4 / math.log(recipe.classes), optimizer=by_benchmark(None, Adam(weight_decay=5e-4), None),
             augment=recipe.augment),
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
