"""The published benchmarks as functions that return plain settings, the rows of their tables, and what fits a source.

    >>> recipe("cifar10").batch_size                     # a dataclass; change it with dataclasses.replace
    200
    >>> table = rows(recipe("cifar10"), "official")      # the table's rows: a method with its settings
    >>> table["petal"].label, table["petal"].options["ema"]
    ('PETAL (FIM)', 0.999)

`petal.runs` runs them.
"""

from petal.recipes.fit import FitReport, Loader, fit, train
from petal.recipes.published import RECIPES, FitSettings, Recipe, recipe
from petal.recipes.rows import FIDELITIES, TABLE_1, WRAPPERS, Row, load_plugin, pick_rows, rows
from petal.recipes.settings import SGD, Adam, apply_settings, parse_value

__all__ = [
    "FIDELITIES",
    "RECIPES",
    "SGD",
    "TABLE_1",
    "WRAPPERS",
    "Adam",
    "FitReport",
    "FitSettings",
    "Loader",
    "Recipe",
    "Row",
    "apply_settings",
    "fit",
    "load_plugin",
    "parse_value",
    "pick_rows",
    "recipe",
    "rows",
    "train",
]
