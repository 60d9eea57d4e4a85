"""A posterior of another precision than the network's becomes one of the network's."""

import pytest
import torch

import petal
from methods.made import ENGINES, same
from networks import images, network
from petal.engine import Policy


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kept", "net"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_the_posterior_is_used_in_the_networks_precision(kept: torch.dtype, net: torch.dtype, engine: str) -> None:
    model = network(dtype=net)
    q = petal.DiagonalGaussian.isotropic(network(dtype=kept), std=0.05)
    adapter, twin = (
        petal.accelerate(petal.Petal(model, posterior, views=2, confidence=2.0), engine, policy=Policy())
        for posterior in (q, q.to("cpu", net))
    )
    for parameters in (adapter.model, adapter.teacher, adapter.source):
        assert {p.dtype for p in parameters.parameters()} == {net}
    assert {v.dtype for v in (*adapter.posterior.mean.values(), *adapter.posterior.var.values())} == {net}
    for seed in range(2):
        x = images(seed=seed, dtype=net)
        answer = adapter(x)
        assert answer.dtype == net
        assert torch.equal(answer, twin(x))
    assert same(adapter.state_dict(), twin.state_dict())
    assert {v.dtype for v in (*q.mean.values(), *q.var.values())} == {kept}
