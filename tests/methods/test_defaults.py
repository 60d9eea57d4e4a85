"""Defaults that published numbers rest on, written out once more."""

import inspect

import pytest

import petal

TEACHER = {"lr": 1e-3, "ema": 0.999, "views": 32, "confidence": 0.92, "steps": 1, "episodic": False, "seed": 0,
           "augment": None, "optimizer": None, "loss": "cross-entropy"}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (petal.CoTTA, TEACHER | {"restore": petal.Stochastic(0.01), "gate": "batch", "average": "logits"}),
        (
            petal.Petal,
            TEACHER
            | {"restore": petal.Fisher(0.03), "gate": "sample", "average": "probs", "prior_weight": 1e-9, "posterior": None}
            | {"learn": "plain", "target": "teacher", "answer": "teacher", "warmup": None, "calibrate": None, "samples": 4},
        ),
    ],
)
def test_defaults(method: type[petal.Adapter], expected: dict[str, object]) -> None:
    parameters = inspect.signature(method.__init__).parameters
    assert {k: p.default for k, p in parameters.items() if p.default is not p.empty} == expected
