"""A small experiment on digits for the tests of runs, and its jobs."""

from dataclasses import replace
from pathlib import Path

from petal import DiagonalGaussian, models
from petal.data import digits
from petal.recipes import WRAPPERS, Row, apply_settings, pick_rows, recipe, rows
from petal.runs import (
    Experiment,
    Job,
    JobProgress,
    OpenExperiment,
)

QUICK = {"views": 2, "confidence": 2.0}


def opened(source: Path, **settings: object) -> OpenExperiment:
    model = models.build("small", 10, source / "network.safetensors", **recipe("digits").network_options)
    q = DiagonalGaussian.load(source / "posterior.safetensors")
    experiment = Experiment(**{"recipe": "digits", "images": 16, "batch_size": 8, **settings})
    return OpenExperiment(experiment, model, q, digits("test"))


def known(*settings: str) -> dict[str, Row]:
    """The rows of the digits, with few views that are always needed."""
    return apply_settings(rows(replace(recipe("digits"), **QUICK)), settings, WRAPPERS)


def changed(o: OpenExperiment, **settings: object) -> OpenExperiment:
    return replace(o, experiment=replace(o.experiment, **settings))


def job(name: str, seed: int = 0) -> Job:
    return Job(pick_rows(known(), [name])[0], 1, seed)


def without_time(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


class Stop(Exception):
    pass


def stopping_at(batch: int):
    def progress(p: JobProgress) -> None:
        if p.record is not None and p.position == batch:
            raise Stop

    return progress
