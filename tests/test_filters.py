"""Which samples count, and the mean prediction that redundancy is measured by, by hand."""

import math

import pytest
import torch

from petal.errors import ConfigError
from petal.filters import Redundancy, masked_mean, reliable


def test_a_sample_is_reliable_below_the_margin_and_what_is_no_number_passes() -> None:
    limit = 0.4 * math.log(5)
    uncertainty = torch.tensor([0.0, limit - 1e-4, limit, limit + 1e-4, math.inf, math.nan])
    assert reliable(uncertainty, 0.4, 5).tolist() == [True, True, False, False, False, True]
    assert math.isnan(masked_mean(uncertainty, reliable(uncertainty, 0.4, 5)))


def test_the_mean_prediction_begins_with_the_first_samples_and_moves_slowly() -> None:
    redundancy, p = Redundancy(similarity=0.5, momentum=0.75), torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.0, 1.0]])
    first = redundancy.follow(p, None, torch.tensor([True, True, False]))
    assert first.tolist() == pytest.approx([0.6, 0.4])
    second = redundancy.follow(p, first, torch.tensor([False, False, True]))
    assert second.tolist() == pytest.approx([0.75 * 0.6, 0.75 * 0.4 + 0.25])
    assert torch.equal(redundancy.follow(p, second, torch.zeros(3, dtype=torch.bool)), second)
    assert torch.equal(redundancy.follow(p * math.nan, second, torch.ones(3, dtype=torch.bool)), second)


def test_a_prediction_like_the_mean_is_redundant() -> None:
    p = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    redundancy = Redundancy(similarity=0.5)
    assert redundancy.unlike(p, torch.tensor([1.0, 0.0])).tolist() == [False, False, True]
    assert redundancy.unlike(p, torch.zeros(2)).all()
    assert redundancy.unlike(p, None).all()
    with pytest.raises(ConfigError, match=r"in \[0, 1\], got 0.5 and 1.5"):
        Redundancy(0.5, 1.5)
