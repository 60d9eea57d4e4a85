"""What the base class does around a step: predictions and refused batches leave everything, states hold everything."""

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ENGINES, run, same
from networks import CLASSES, images, network
from petal.engine import Policy
from petal.norm import RobustNorm, following


class Counting(petal.Adapter):
    """Draws, counts and lets statistics follow, in predictions too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False, norm=lambda layer: RobustNorm(layer, 0.2))
        self.register_state("count", torch.zeros(()))
        self.register_state("last", None)
        self.register_statistics("model")

    def prediction(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        noise = torch.rand(len(x), CLASSES, generator=self.generator)
        with following(self.model):
            self.last = self.logits(self.model, x) + noise
        return self.last

    def step(self, x: Tensor) -> Tensor:
        return self.prediction(x).clone()


def counting(engine: str) -> petal.Adapter:
    return petal.accelerate(Counting(network()), engine, policy=Policy())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prediction_leaves_declared_state_statistics_and_random_numbers(engine: str) -> None:
    adapter = counting(engine)
    for batches in (0, 2):
        run(adapter, *range(batches))
        before = adapter.state_dict()
        adapter.predict(images(seed=7))
        assert same(adapter.state_dict(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_that_is_refused_leaves_them_too(engine: str) -> None:
    adapter = counting(engine)
    run(adapter, 0)
    before = adapter.state_dict()
    for call in (adapter, adapter.predict):
        with pytest.raises(petal.InputError, match="cannot take a batch"):
            call(images()[:, :2])
        assert same(adapter.state_dict(), before)


class Descending(torch.optim.SGD):
    """SGD by a whole number, which takes the gradients for itself."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(1.0)


def test_settings_of_an_optimizer_that_are_whole_numbers_come_with_a_state() -> None:
    def made(lr: int, patience: int) -> petal.Adapter:
        def optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": parameters, "patience": patience}], lr=lr, nesterov=False)

        return petal.Tent(network(), lr=lr, optimizer=optimizer)

    one, other = made(1, 3), made(2, 5)
    run(one, 0)
    other.load_state_dict(one.state_dict())
    (group,) = other.optimizer.param_groups
    assert (group["lr"], group["patience"], type(group["patience"])) == (1, 3, int)
    assert group["nesterov"] is False


def test_masks_are_of_the_gradients_from_before_the_optimizers_step() -> None:
    """Also by an optimizer that changes the gradients."""

    def made(optimizer: type[torch.optim.Optimizer]) -> petal.Adapter:
        model, restore = network(), petal.Fisher(0.2)
        return petal.CoTTA(model, lr=0.01, views=0, restore=restore, optimizer=lambda p, lr: optimizer(p, lr=lr))

    plain, greedy = made(torch.optim.SGD), made(Descending)
    run(plain, 0), run(greedy, 0)
    assert float(greedy.restored) == float(plain.restored) > 0.1
    assert same(dict(plain.adapted), dict(greedy.adapted))


@pytest.mark.parametrize("engine", ENGINES)
def test_petal_begins_at_the_mean_of_its_posterior(engine: str) -> None:
    model, generator = network(), torch.Generator().manual_seed(0)
    mean = {n: p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    q = petal.DiagonalGaussian(mean, {n: torch.full_like(p, 0.01) for n, p in mean.items()})
    adapter = petal.accelerate(petal.Petal(model, q, views=0, optimizer=torch.optim.SGD), engine, policy=Policy())
    for begun in (adapter.model, adapter.teacher, adapter.source):
        assert same(dict(begun.named_parameters()), mean)
    assert same(adapter.origin(), mean)
    assert same(dict(adapter.posterior.mean), mean)
    assert same(dict(adapter.posterior.var), dict(q.var))


class TwoLayers(nn.Module):
    """Two linear layers, of which the second is given features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm2d(3), nn.Linear(3, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.norm(x).mean((2, 3))).relu())


@pytest.mark.parametrize("engine", ENGINES)
def test_features_are_what_the_last_linear_layer_is_given(engine: str) -> None:
    torch.manual_seed(0)
    adapter = petal.accelerate(petal.Tent(TwoLayers().eval()), engine, policy=Policy())
    features, logits = adapter.features(adapter.model, images())
    assert features.shape == (12, 7)
    assert (features >= 0).all()
    torch.testing.assert_close(adapter.model.last(features), logits)


def test_a_method_written_for_an_earlier_version_works_on() -> None:
    """It names its weights in `_weights` and puts them back itself."""
    with pytest.warns(DeprecationWarning, match="Earlier._weights: name what changes in register_network"):

        class Earlier(petal.Adapter):
            def __init__(self, model: nn.Module) -> None:
                super().__init__(model, batch_statistics=True)
                self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)
                self.adapt(petal.norm.affine_parameters(self.model), 0.1)

            def _weights(self) -> dict[str, Tensor]:
                return super()._weights() | {"mean": self.mean}

            def _restore_initial(self) -> None:
                self.mean.zero_()

            def step(self, x: Tensor) -> Tensor:
                logits = self.forward_through(self.model, x)
                self.update(logits.square().mean())
                self.mean.add_(logits.detach().mean(0))
                return logits

    adapter, other = Earlier(network()), Earlier(network())
    adapter(images())
    state = adapter.state_dict()
    assert state["mean"].abs().sum() > 0
    other.load_state_dict(state)
    assert torch.equal(other(images(seed=1)), adapter(images(seed=1)))
    adapter.reset()
    assert not adapter.mean.any()
