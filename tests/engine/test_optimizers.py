"""Every setting of Adam and SGD means on the engine what it means to torch."""

import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from petal.engine import Policy
from petal.methods.descent import Ema
from petal.methods.mean_teacher import network_with

SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"weight_decay": 0.5}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.5}),
    (torch.optim.Adam, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_one_setting(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> None:
    """Views of all batches, so that the gradient is far from rounding noise; and no restore, which flips near its limit."""

    def adapter(engine: str) -> petal.Adapter:
        model = network()
        made = petal.CoTTA(model, lr=1e-2, ema=0.5, views=2, confidence=2.0, restore=None,
                           augment=lambda x: (x * 0.5).flip(-1), optimizer=build)  # fmt: skip
        return petal.accelerate(made, engine, policy=Policy())

    def build(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return kind(parameters, lr=lr, **settings)  # type: ignore[call-arg]

    plain, fast = adapter("eager"), adapter("auto")
    for seed in range(3):
        expected, got = plain(images(seed=seed)), fast(images(seed=seed))
        assert torch.allclose(expected, got, atol=1e-4), (expected - got).abs().max()
    start = plain.origin()
    for name, p in plain.adapted.items():
        moved = (p - start[name]).norm()
        assert moved > 1e-4
        assert (fast.adapted[name] - p).norm() < 1e-2 * moved, name


class Sometimes(petal.Adapter):
    """Its average follows every second step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)
        self.register_network("average", network_with(self.model, None))
        self.adapt(dict(self.model.named_parameters()), 1e-3, lambda p, lr: torch.optim.Adam(p, lr=lr, eps=1e-3))
        self.follows = True

    def step(self, x: Tensor) -> Tensor:
        logits = self.logits(self.model, x)
        self.descend(logits.square().mean(), after=[Ema(self.average, 0.9)] if self.follows else [])
        return logits


@pytest.mark.parametrize("change", ["to plain code", "to steps without an average and back", "none"])
def test_steps_are_counted_once_whoever_makes_them(change: str) -> None:
    """The sweep counts for all parameters together, torch for each of them."""
    plain, fast = Sometimes(network()), petal.accelerate(Sometimes(network()), policy=Policy())
    for seed in range(6):
        if seed == 2 and change == "to plain code":
            petal.accelerate(fast, "eager")
        plain.follows = fast.follows = change != "to steps without an average and back" or seed not in (2, 3, 5)
        plain(images(seed=seed)), fast(images(seed=seed))
    assert [{float(s["step"]) for s in a.optimizer.state.values()} for a in (plain, fast)] == [{6.0}, {6.0}]
    for name, parameter in plain.adapted.items():
        torch.testing.assert_close(fast.adapted[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


def test_a_state_goes_on_in_the_layout_of_the_parameters() -> None:
    """torch's fused Adam goes through memory: moments of a convolution have to lie in it as its weights do."""
    plain, fast, other = (Sometimes(network()) for _ in range(3))
    petal.accelerate(fast, policy=Policy()), petal.accelerate(other, policy=Policy())
    for adapter in (plain, fast, other):
        adapter.follows = False
        adapter.descent.optimizer = torch.optim.Adam(list(adapter.adapted.values()), lr=1e-3, eps=1e-3, fused=True)
        adapter._make_optimizer = lambda p, lr: torch.optim.Adam(p, lr=lr, eps=1e-3, fused=True)
    for seed in range(2):
        plain(images(seed=seed)), fast(images(seed=seed))
    other.load_state_dict(plain.state_dict())
    for seed in range(2, 4):
        answers = [adapter(images(seed=seed)) for adapter in (plain, fast, other)]
        for answer in answers[1:]:
            torch.testing.assert_close(answer, answers[0], rtol=1e-3, atol=1e-3)
    for name, parameter in plain.adapted.items():
        torch.testing.assert_close(other.adapted[name], parameter, rtol=1e-4, atol=1e-5, msg=name)
