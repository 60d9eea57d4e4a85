"""Masks of the restores against NumPy."""

import numpy as np
import pytest
import torch

from petal import Fisher, Stochastic


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.95])
def test_fisher_has_one_threshold_over_all_parameters(quantile: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.zeros(7, 11), torch.zeros(5), torch.zeros(3, 2, 2)]
    for scale, p in zip((1.0, 0.1, 10.0), parameters, strict=True):
        p.grad = scale * torch.randn(p.shape, generator=generator)
    kept = [p.grad.clone() for p in parameters]
    masks = Fisher(quantile).masks(parameters, generator)
    squares = [g.double().numpy() ** 2 for g in kept]
    threshold = np.quantile(np.concatenate([s.ravel() for s in squares]), quantile)
    for mask, square in zip(masks, squares, strict=True):
        np.testing.assert_array_equal(mask.numpy(), square < threshold)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, kept, strict=True)), "the gradients are still needed"


def test_a_weight_at_the_threshold_is_not_restored() -> None:
    parameter = torch.zeros(5)
    parameter.grad = torch.tensor([4.0, 0.0, 3.0, -1.0, 2.0])             # the median of the squares is one of them, 4
    assert Fisher(0.5).masks([parameter], torch.Generator())[0].tolist() == [False, True, False, True, False]
    assert not Fisher(0.0).masks([parameter], torch.Generator())[0].any()


def test_a_parameter_without_a_gradient_has_no_information() -> None:
    used, unused = torch.tensor([1.0, -2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    (used * torch.tensor([0.3, -0.4])).sum().backward()
    masks = Fisher(0.8).masks([used, unused], torch.Generator())   # squares 0.09, 0.16, 0, 0, 0: threshold 0.104
    assert [mask.tolist() for mask in masks] == [[True, False], [True, True, True]]
    assert unused.grad is None


def test_stochastic_draws_its_share_anew_each_step() -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.zeros(100, 100), torch.zeros(1000)]
    first, second = (Stochastic(0.2).masks(parameters, generator) for _ in range(2))
    assert [mask.shape for mask in first] == [p.shape for p in parameters]
    assert float(first[0].double().mean()) == pytest.approx(0.2, abs=0.02)
    assert not torch.equal(first[0], second[0])
