"""PALM against runs of the authors' code, and what that code and the paper differ in."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import close, flat, inputs
from methods.golden import augment, fast, read, sgd
from networks import network
from petal.errors import ConfigError
from petal.recipes.settings import Adam

HOW = {"adam": (2e-3, Adam()), "decay": (2e-3, Adam(weight_decay=0.05)), "sgd": (0.01, sgd)}


def without_bias(values: Tensor, norm: str) -> Tensor:
    """Batch norm undoes conv1.bias, so that its gradient is rounding, of which Adam makes steps."""
    return torch.cat([values[:162], values[168:]]) if norm == "batch" else values


@pytest.mark.parametrize("optimizer", HOW)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_palm_is_the_reference(norm: str, optimizer: str) -> None:
    golden, settings = read("palm")
    lr, step = HOW[optimizer]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        model, batches = inputs(norm, dtype)
        adapter = petal.PALM(model, augment=augment, **(settings | {"lr": lr, "optimizer": step}))
        adapter = fast(adapter) if dtype == torch.float32 else adapter
        logits = torch.cat([adapter(x) for x in batches])
        case = f"{norm}.{optimizer}."
        assert close(logits, golden[f"{case}logits"], tolerance)
        own, wanted = (without_bias(v, norm) for v in (flat(adapter.adapted), golden[f"{case}weights"]))
        assert close(own, wanted, tolerance)


def made(**options: object) -> tuple[petal.PALM, list[Tensor]]:
    model, batches = inputs("group")
    settings = {"lr": 0.01, "threshold": 2.7, "temperature": 30.0, "augment": augment, "optimizer": torch.optim.SGD}
    return petal.PALM(model, **(settings | options)), batches


def gradients(adapter: petal.PALM, x: Tensor) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Toward the uniform prediction, and of the loss, by autograd."""
    values = {name: value.detach().clone().requires_grad_() for name, value in adapter.adapted.items()}
    logits, again = (torch.func.functional_call(adapter.model, values, (images,)) for images in (x, augment(x)))
    p, log_p = logits.softmax(1), logits.log_softmax(1)
    entropy = -(p * log_p).sum(1)
    sure = entropy[entropy < adapter.margin * np.log(10)]
    loss = (sure.mean() if len(sure) else 0) - adapter.consistency * 10 * (p * again.log_softmax(1)).sum(1).mean()
    uniform = -(logits / adapter.temperature).log_softmax(1).sum(1).mean()
    found = [torch.autograd.grad(value, list(values.values()), retain_graph=True) for value in (uniform, loss)]
    return tuple({name: g.numpy() for name, g in zip(values, each, strict=True)} for each in found)


@pytest.mark.parametrize("unselected", ["last", "frozen"])
def test_rates_by_hand(unselected: str) -> None:
    adapter, batches = made(unselected=unselected, momentum=0.2, consistency=0.1, lr=0.002, threshold=4.0)
    mean: dict[str, np.ndarray] = {}
    share: dict[str, float] = {}
    rested = stepped = 0
    for x in batches:
        before = {name: value.detach().numpy().copy() for name, value in adapter.adapted.items()}
        uniform, loss = gradients(adapter, x)
        for name, g in uniform.items():
            if np.abs(g).sum() <= 4:
                now = np.abs(g * before[name])
                mean[name] = 0.2 * mean.get(name, 0) + 0.8 * now
                share[name] = ((np.abs(now - mean[name]) + 1e-8) / (mean[name] + 1e-8)).mean()
            elif unselected == "frozen":
                share[name] = 0.0
            rested += share.get(name, 0.0) == 0
            stepped += np.abs(g).sum() > 4 and share.get(name, 0.0) > 0
        adapter(x)
        for name, value in adapter.adapted.items():
            wanted = before[name] - 0.002 * share.get(name, 0.0) * loss[name]
            assert np.allclose(value.detach().numpy(), wanted, atol=1e-10), name
    assert rested > 0
    assert (stepped > 0) == (unselected == "last")      # with the rate of when it was selected


def test_the_optimizer_begins_anew_or_goes_on() -> None:
    for engine in (lambda adapter: adapter, fast):
        anew, on = (engine(made(fresh=fresh, optimizer=None)[0]) for fresh in (True, False))
        for x in made()[1]:
            anew(x), on(x)
        steps = [{int(state["step"]) for state in adapter.optimizer.state.values()} for adapter in (anew, on)]
        assert steps == [{1}, {5}]
        assert not close(flat(anew.adapted), flat(on.adapted), 1e-5)


def test_a_batch_without_a_sure_sample_is_learned_from_by_consistency() -> None:
    adapter, (x, *_) = made(margin=0.0, consistency=0.2)
    _, loss = gradients(adapter, x)
    assert np.isfinite(loss["conv1.weight"]).all()
    adapter(x)
    assert adapter.skipped == 0
    assert all(value.isfinite().all() for value in adapter.adapted.values())
    assert not close(flat(adapter.adapted), flat(adapter.origin()), 1e-6)
    still, _ = made(margin=0.0, consistency=0.0)
    still(x)
    assert close(flat(still.adapted), flat(still.origin()), 1e-12)


def test_what_adapts() -> None:
    names = {kind: set(made(adapts=kind)[0].adapted) for kind in ("conv", "norm", "weights", "all")}
    assert names["weights"] - names["conv"] == {"fc.weight", "fc.bias"}
    assert names["norm"] == {"bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}
    assert "patches.weight" in petal.PALM(network("vit")).adapted
    with pytest.raises(ConfigError, match=r"adapts 'conv' parameters and this network has none: adapts='all'"):
        petal.PALM(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
    wrong = {"threshold": -1, "temperature": 0, "momentum": 2, "margin": -1, "consistency": -1, "adapts": "x",
             "unselected": "x"}  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            made(**{name: value})
