"""A digits network and posterior for the tests of recipes and commands: barely trained, in a second."""

from dataclasses import replace
from pathlib import Path

from petal import models
from petal.data import digits, from_arrays
from petal.recipes import fit, recipe


def make_source(folder: Path) -> Path:
    chosen = recipe("digits")
    x, y = digits("train").batch(range(300))
    settings = replace(chosen.fit, epochs=2, swag_epochs=1, swag_snapshots=3)
    fit(models.build("small", 10, seed=0, **chosen.network_options), from_arrays(x, y), settings, folder)
    return folder
