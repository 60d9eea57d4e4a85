"""How small the variance that `RecentNorm` divides by may become."""

import pytest
import torch
from torch import nn

from petal.norm import Following, RecentNorm


@pytest.mark.parametrize("variance", [0.5, 2.0])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_the_variance_is_at_least_a_twentieth_of_the_sources(variance: float, value: float) -> None:
    """After many images of one value there is no variance left in what was seen."""
    layer = nn.BatchNorm1d(1, eps=0.0).double().eval()
    layer.running_var.fill_(variance)
    shared = Following(2.0, like=layer.weight)
    norm = RecentNorm(layer, shared, source=0.0, own=0.0)
    shared.begin(2)
    for _ in range(60):
        shared.expect(torch.tensor([0, 0, 1, 1]), shuffled=0.0)
        norm(torch.full((4, 1), value, dtype=torch.float64))
        norm.recent.copy_(norm.moved)
    shared.expect(None, shuffled=0.0)
    x = torch.tensor([[value], [value + 1]], dtype=torch.float64)
    below, above = norm(x).flatten().tolist()
    assert below == pytest.approx(0.0, abs=1e-6)
    assert above == pytest.approx((20 / variance) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("variance", [0.5, 2.0])
def test_so_is_what_one_image_may_move_the_estimate_by(variance: float) -> None:
    """Where what was seen has no variance left: 4 deviations of a twentieth of the source's variance."""
    layer = nn.BatchNorm1d(1, eps=0.0).double().eval()
    layer.running_var.fill_(variance)
    norm = RecentNorm(layer, Following(2.0, like=layer.weight), source=0.0, own=0.0)
    estimate = torch.tensor([[3.0], [9.0]], dtype=torch.float64)                     # mean and mean square: no variance
    seen = torch.tensor([[[100.0], [-100.0]], [[1e6], [1e6]]], dtype=torch.float64)
    reach = 4 * (variance / 20) ** 0.5
    means = [3 + reach, 3 - reach]
    found = norm.bounded(seen, estimate)
    assert found[0].flatten().tolist() == pytest.approx(means)
    assert found[1].flatten().tolist() == pytest.approx([mean**2 + 16 * variance / 20 for mean in means])
