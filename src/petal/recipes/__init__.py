"""The published benchmarks as functions that return plain settings, and what runs, fits and tunes them.

    recipe = petal.recipes.RECIPES["cifar10"]()          # a dataclass; change it with dataclasses.replace
    rows = petal.recipes.rows(recipe, "official")        # the table's rows: a method with its settings
    bench = Bench(recipe, rows, data, model, posterior)  # what a run needs in memory
    run_job(Job("petal", order=1, seed=0), folder, bench)
"""

from petal.recipes.fit import FitReport, Loader, fit, train
from petal.recipes.published import RECIPES, FitSettings, Recipe, recipe
from petal.recipes.rows import FIDELITIES, TABLE_1, WRAPPERS, Row, load_plugin, pick_rows, rows
from petal.recipes.run import (
    Bench,
    Job,
    Progress,
    jobs_for,
    make_manifest,
    open_run,
    read_records,
    run_job,
    score,
)
from petal.recipes.settings import SGD, Adam, apply_settings, parse_value
from petal.recipes.tune import ALPHAS, Trial, tune

__all__ = [
    "ALPHAS",
    "FIDELITIES",
    "RECIPES",
    "SGD",
    "TABLE_1",
    "WRAPPERS",
    "Adam",
    "Bench",
    "FitReport",
    "FitSettings",
    "Job",
    "Loader",
    "Progress",
    "Recipe",
    "Row",
    "Trial",
    "apply_settings",
    "fit",
    "jobs_for",
    "load_plugin",
    "make_manifest",
    "open_run",
    "parse_value",
    "pick_rows",
    "read_records",
    "recipe",
    "rows",
    "run_job",
    "score",
    "train",
    "tune",
]
