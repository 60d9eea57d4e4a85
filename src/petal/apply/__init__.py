"""Adapt over images without labels and write what was predicted, and what was done, to a file: `petal apply`.

    settings   what can be set, and the adapter and images made of it
    run        the images through the adapter into a .csv, resumable
"""

from petal.apply.run import Applied, ApplyProgress, apply
from petal.apply.settings import Application, Opened

__all__ = ["Application", "Applied", "ApplyProgress", "Opened", "apply"]
