"""CMF against runs of the collection's code, and its filter by hand."""

import pytest
import torch

import petal
from methods.field import CASES, close, flat, golden_run, inputs
from methods.golden import augment, sgd
from petal.errors import ConfigError


@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_cmf_is_the_reference(norm: str, optimizer: str) -> None:
    adapter, golden, logits = golden_run("cmf", petal.CMF, norm, optimizer)
    hidden = {name: value for name, value in adapter.hidden.named_parameters() if name in adapter.adapted}
    assert close(logits, golden["logits"])
    assert close(flat(adapter.adapted), golden["weights"])
    assert close(flat(hidden), golden["hidden"])
    assert close(adapter.variance, golden["variance"], 1e-14)
    quick, _, rough = golden_run("cmf", petal.CMF, norm, optimizer, dtype=torch.float32)
    assert quick.executor is not None
    assert close(rough, golden["logits"], 1e-3)
    assert close(flat(quick.adapted), golden["weights"], 1e-3)


def adapted(kind: type[petal.ROID], **options: object) -> petal.Adapter:
    model, batches = inputs()
    adapter = kind(model, 0.02, augment=augment, optimizer=sgd, **options)
    for x in batches:
        adapter(x)
    return adapter


def test_a_filter_of_little_noise_stays_at_the_source() -> None:
    """While the gain is below 1e-4 the hidden state stays, and the weights are ROID's."""
    filtered = adapted(petal.CMF, noise=0.005, share=0.05)
    assert filtered.noise == pytest.approx(0.005 * 28 / 38_400)
    assert close(flat(filtered.adapted), flat(adapted(petal.ROID, share=0.05).adapted), 1e-12)
    assert not close(flat(adapted(petal.CMF, noise=40.0, share=0.05).adapted), flat(filtered.adapted), 1e-6)


def test_the_filter_by_hand() -> None:
    """One weight and plain numbers: predict, update with a clipped gain, move."""
    start, hidden = {"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0])}
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    weights = petal.methods.descent.Weights({"a": weight}, torch.Generator())
    variance = torch.zeros((), dtype=torch.float64)
    filtered = petal.methods.descent.Kalman(hidden, start, variance, noise=0.2, keep=0.5, share=0.25)
    with torch.no_grad():
        filtered.apply_(weights, None)                  # v = 0.2, gain 0.8 / 1.0 = 0.8, raised to 0.89
        assert torch.allclose(hidden["a"], torch.tensor([0.89 * 1 + 0.11 * 3]))
        assert torch.allclose(weight, torch.tensor([0.75 * 3 + 0.25 * 1.22]))
        assert float(variance) == pytest.approx(0.89 * 0.2)
        filtered.apply_(weights, None)
    assert float(variance) == pytest.approx(0.89 * (0.25 * 0.178 + 0.2))
    assert torch.allclose(hidden["a"], torch.tensor([0.89 * (0.5 * 1.22 + 0.5) + 0.11 * 2.555]))


def test_reset_puts_the_variance_back() -> None:
    adapter = adapted(petal.CMF, noise=40.0)
    assert float(adapter.variance) > 0
    assert "state.variance" in adapter.state_dict()
    assert "hidden.bn1.weight" in adapter.state_dict()
    adapter.reset()
    assert float(adapter.variance) == 0


@pytest.mark.parametrize("name", ["noise", "forget"])
def test_settings_that_make_no_sense(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        petal.CMF(inputs()[0], **{name: -1})
