"""Networks in the form in which the engine runs them: finding the features changes nothing."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal.engine import Policy
from petal.engine.flat import Layout
from petal.engine.networks import Member
from petal.methods.network import ViewSource
from petal.norm import RobustNorm, following, shared_copy


class Watching(petal.Adapter):
    """Asks for features while running statistics follow the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, 0.2))
        self.register_statistics("model")

    def step(self, x: Tensor) -> Tensor:
        with following(self.model):
            return self.features(self.model, x)[1]


def test_statistics_follow_a_batch_once_though_the_layer_with_the_features_is_looked_for() -> None:
    plain, fast = Watching(network()), petal.accelerate(Watching(network()), policy=Policy())
    for seed in range(2):
        torch.testing.assert_close(fast(images(seed=seed)), plain(images(seed=seed)), rtol=1e-4, atol=1e-4)
        for (name, mine), (_, theirs) in zip(fast.model.named_buffers(), plain.model.named_buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{name} after batch {seed}")


class Other(petal.Adapter):
    """Answers by the mean over views of a frozen copy of the network, which nothing else runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)
        self.register_network("copy", deepcopy(self.model), follows=False)

    def step(self, x: Tensor) -> Tensor:
        views = ViewSource(x, petal.Views(per_sample=True), 3, self.generator)
        with torch.no_grad():
            return self.network(self.copy).over(views, "probs")


@pytest.mark.parametrize("threads", [1, 2])
def test_views_that_are_made_again_in_full_precision_are_the_same_views(threads: int) -> None:
    def refuse(layer: nn.Module, x: tuple[Tensor]) -> None:
        if x[0].dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")

    model = network()
    model.norm1.register_forward_pre_hook(refuse)
    full = petal.accelerate(Other(model), policy=Policy(view_threads=threads))
    low = petal.accelerate(Other(model), policy=Policy(low_views=torch.bfloat16, view_threads=threads))
    for seed in range(2):
        assert torch.equal(low(images(seed=seed)), full(images(seed=seed)))
    assert torch.equal(low.generator.get_state(), full.generator.get_state())


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_in_low_precision_follow_weights_that_somebody_changes(threads: int) -> None:
    def made(change: bool) -> petal.Adapter:
        model = network()
        if change:
            with torch.no_grad():
                model.fc.weight.mul_(-1)
        return petal.accelerate(Other(model), policy=Policy(low_views=torch.bfloat16, view_threads=threads))

    adapter, other = made(False), made(True)
    assert not torch.equal(adapter(images()), other(images()))
    with torch.no_grad():
        adapter.copy.fc.weight.mul_(-1)
    assert torch.equal(adapter(images()), other(images()))


def test_copies_of_a_network_on_the_parameters_of_another_are_made_anew_each_time() -> None:
    """Kernels change the weights that they share, and torch counts no version of it."""
    model = network()
    layout = Layout.of(dict(model.named_parameters()), channels_last=False)
    owner = Member(model, layout)
    guest = Member(shared_copy(model, {}), layout, [owner])
    assert guest.flat is owner.flat
    for factor in (1, 2):
        owner.flat.data.mul_(factor)
        copies = dict(guest.in_low_precision(torch.bfloat16, adapted=True).named_parameters())
        assert copies["fc.weight"].dtype == torch.bfloat16
        assert torch.equal(copies["fc.weight"], model.fc.weight.bfloat16())
