"""What a method accepts as settings and as batches, to the edge."""

import math

import numpy as np
import pytest

import petal
from methods.made import make
from networks import images, network
from petal.methods.inputs import check_number, not_finite


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, "1", None, 1j, -0.1, 1.1])
def test_what_is_no_number_within_the_limits_is_refused_by_name(value: object) -> None:
    with pytest.raises(petal.ConfigError, match="share must be a number from 0 to 1, got"):
        check_number("share", value, low=0, high=1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_without_limits_a_number_is_finite(value: float) -> None:
    with pytest.raises(petal.ConfigError, match="lr must be a number, got"):
        check_number("lr", value)
    with pytest.raises(petal.ConfigError, match="lr must be a number from 0, got"):
        petal.Tent(network(), lr=value)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(1), np.int64(0)])
def test_limits_are_included(value: float) -> None:
    check_number("share", value, low=0, high=1)


@pytest.mark.parametrize("value", [1.0, 0, np.float64(2)])
def test_whole_numbers(value: float) -> None:
    with pytest.raises(petal.ConfigError, match="steps must be a whole number from 1, got"):
        check_number("steps", value, low=1, whole=True)


def test_samples_are_counted_and_not_numbers() -> None:
    x = images(5)
    x[1, :, 0] = math.nan
    x[3, 0, 0, 0] = math.inf
    assert "NaN or Inf in 2 of 5 samples" in str(not_finite(x))


@pytest.mark.parametrize(
    ("view", "words"),
    [(lambda x: x.double(), "float64 on cpu"), (lambda x: x[:, :1], r"got \[12, 1, 8, 8\]"), (lambda x: None, "NoneType")],
)
def test_a_view_is_like_the_batch(view: object, words: str) -> None:
    adapter = make("cotta", augment=view)
    with pytest.raises(petal.InputError, match=words):
        adapter(images())
