"""What must hold between the methods: PETAL contains CoTTA, and the restores meet at their ends."""

import pytest
import torch
from torch import Tensor

import petal
from networks import images, network


def point_posterior(model: torch.nn.Module) -> petal.DiagonalGaussian:
    return petal.DiagonalGaussian.isotropic(model, std=0.1)


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("net", ["batch-norm", "group-norm", "vit"])
def test_petal_without_prior_is_cotta(net: str) -> None:
    model = network(net)
    common = {"views": 4, "confidence": 0.9, "restore": petal.Stochastic(0.2), "gate": "batch", "average": "logits"}
    common["seed"] = 7
    left = petal.Petal(model, point_posterior(model), prior_weight=0, **common)
    right = petal.CoTTA(model, **common)
    for seed in range(6):
        assert torch.equal(left(images(seed=seed)), right(images(seed=seed)))
        assert same_weights(left.model, right.model)
        assert same_weights(left.teacher, right.teacher)
    assert 0.1 < float(left.restored) < 0.3


def test_no_restore_in_three_ways() -> None:
    model = network()
    adapters = [
        petal.Petal(model, point_posterior(model), views=4, confidence=0.9, restore=restore, prior_weight=1e-4)
        for restore in (petal.Fisher(0), petal.Stochastic(0), None)
    ]
    for seed in range(4):
        outputs = [adapter(images(seed=seed)) for adapter in adapters]
        assert all(torch.equal(outputs[0], o) for o in outputs)
        assert all(same_weights(adapters[0].model, a.model) for a in adapters)
        assert all(float(a.restored) == 0 for a in adapters)


def test_stochastic_one_returns_the_student_to_the_source() -> None:
    model = network()
    adapter = petal.Petal(model, point_posterior(model), views=4, confidence=0.9, restore=petal.Stochastic(1))
    for seed in range(3):
        adapter(images(seed=seed))
        assert same_weights(adapter.model, adapter.source)
        assert not same_weights(adapter.teacher, adapter.source)  # it averaged the student before that
        assert float(adapter.restored) == 1


def test_fisher_restores_its_share_and_only_the_least_informative() -> None:
    model = network()
    adapter = petal.Petal(model, point_posterior(model), views=4, confidence=2, restore=petal.Fisher(0.25))
    grads: list[Tensor] = []
    original = adapter.restore.masks

    class Spy:
        def masks(self, parameters: list[Tensor], generator: torch.Generator) -> list[Tensor]:
            grads.extend(p.grad.clone() for p in parameters)
            return original(parameters, generator)

    adapter.restore = Spy()
    adapter(images())
    back = torch.cat([
        (p == s).flatten() for p, s in zip(adapter.model.parameters(), adapter.source.parameters(), strict=True)
    ])
    information = torch.cat([g.flatten() for g in grads]).square()
    assert abs(float(adapter.restored) - 0.25) < 0.01
    assert information[back].max() <= information[~back].min()


def test_starts_at_the_posterior_mean_and_shares_its_memory() -> None:
    model = network()
    mean = {k: v + 0.01 for k, v in model.named_parameters()}
    q = petal.DiagonalGaussian(mean, {k: torch.ones_like(v) for k, v in mean.items()})
    adapter = petal.Petal(model, q)
    for net in (adapter.model, adapter.teacher, adapter.source):
        assert all(torch.equal(p, q.mean[k]) for k, p in net.named_parameters())
    assert all(p.data_ptr() == q.mean[k].data_ptr() for k, p in adapter.source.named_parameters())
    assert all(p.data_ptr() != q.mean[k].data_ptr() for k, p in adapter.model.named_parameters())


def test_uses_the_posteriors_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    model.register_buffer("temperature", torch.tensor(1.0))
    q = petal.DiagonalGaussian.isotropic(model, std=0.1)
    q = petal.DiagonalGaussian(q.mean, q.var, buffers={"temperature": torch.tensor(2.0)})
    adapter = petal.Petal(model, q, views=0)
    for net in (adapter.model, adapter.teacher, adapter.source):
        assert dict(net.named_buffers())["temperature"] == 2.0
    assert model.temperature == 1.0


class Counting:
    def __init__(self) -> None:
        self.calls: list[torch.Size] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape)
        return x


@pytest.mark.parametrize("gate", ["sample", "batch"])
def test_views_only_when_needed(gate: str) -> None:
    model = network()
    augment = Counting()
    adapter = petal.Petal(model, point_posterior(model), views=5, confidence=0.0, gate=gate, augment=augment)
    adapter(images())
    assert augment.calls == []
    assert not adapter.views_used
    adapter.confidence = 2.0
    adapter(images())
    assert augment.calls == [images().shape] * 5
    assert adapter.views_used


def test_augmentation_with_a_generator_gets_the_methods_own() -> None:
    seen: list[torch.Generator] = []

    def noisy(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        seen.append(generator)
        return x + 0.1 * torch.rand(x.shape, generator=generator)

    model = network()
    adapter = petal.Petal(model, point_posterior(model), views=2, confidence=2, augment=noisy, seed=4)
    first = adapter(images())
    assert seen == [adapter.generator] * 2
    adapter.reset()
    assert torch.equal(first, adapter(images()))


@pytest.mark.parametrize("bad", [lambda x: x[:2], lambda x: x.double(), lambda x: None])
def test_bad_augmentation_is_named(bad: object) -> None:
    model = network()
    adapter = petal.CoTTA(model, views=2, confidence=2, augment=bad)
    before = adapter.state_dict()
    with pytest.raises(petal.InputError, match="augment must return"):
        adapter(images())
    assert all(torch.equal(before[k], v) for k, v in adapter.state_dict().items())


@pytest.mark.parametrize(
    ("option", "value"),
    [("ema", 1.5), ("ema", -0.1), ("views", -1), ("views", 2.5), ("gate", "always"), ("average", "mean"),
     ("loss", "mse"), ("confidence", float("nan")), ("prior_weight", -1.0), ("seed", -1)],
)  # fmt: skip
def test_bad_options_are_named(option: str, value: object) -> None:
    model = network()
    with pytest.raises(petal.ConfigError, match=option):
        petal.Petal(model, point_posterior(model), **{option: value})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_bad_restores_are_named(value: float) -> None:
    with pytest.raises(petal.ConfigError, match="quantile of Fisher"):
        petal.Fisher(value)
    with pytest.raises(petal.ConfigError, match="probability of Stochastic"):
        petal.Stochastic(value)


def test_petal_wants_a_posterior() -> None:
    with pytest.raises(petal.ConfigError, match="fit_swag"):
        petal.Petal(network(), 1e-9)
    with pytest.raises(petal.PosteriorError, match="is only in the"):
        petal.Petal(network("vit"), point_posterior(network()))


def test_average_of_probabilities_survives_underflow() -> None:
    """Probabilities below float32's range have a logarithm all the same."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    with torch.no_grad():
        model[1].weight.fill_(0)
        model[1].bias.copy_(torch.tensor([500.0, 0, 0, 0, 0]))
    adapter = petal.Petal(model, point_posterior(model), views=3, confidence=2, augment=lambda x: x)
    logits = adapter(images())
    assert torch.allclose(logits.log_softmax(1)[0], torch.tensor([0.0, -500, -500, -500, -500]))


def test_petal_keeps_at_most_eight_parameter_sized_buffers() -> None:
    """Student, gradient, two moments, teacher, mean (= source), variance and one for scratch."""
    from tracked_memory import peak_bytes

    layers = [torch.nn.Linear(192, 192) for _ in range(20)]
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(192, 5))
    size = sum(p.numel() * 4 for p in model.parameters())
    mean = {k: v.detach().clone() for k, v in model.named_parameters()}
    q = petal.DiagonalGaussian(mean, {k: torch.ones_like(v) for k, v in mean.items()})

    def work() -> None:
        adapter = petal.Petal(model, q, views=2, confidence=2, restore=petal.Fisher(0.03), prior_weight=1e-6)
        for seed in range(3):
            adapter(images(2, seed=seed))

    buffers = peak_bytes(work) / size + 2  # mean and variance are q's own
    assert 7 < buffers <= 8.2, f"{buffers:.2f} parameter-sized buffers, temporaries of single layers included"
