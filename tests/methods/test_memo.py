"""MEMO against runs of the collection's code, and what an episode is."""

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import CASES, RATES, close, flat, golden_run, inputs
from methods.golden import fast, sgd
from networks import images, network
from petal.errors import ConfigError, InputError

STEP = {"adam": torch.optim.Adam, "sgd": sgd}


def views(x: Tensor) -> Tensor:
    """The fixed views of the golden runs: one for each copy of an image."""
    n = torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1, 1)
    return torch.where(n % 2 == 0, x, x.flip(-1)) * (0.7 + 0.1 * n) + 0.02


@pytest.mark.parametrize("episodic", [True, False])
@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_memo_is_the_reference(norm: str, optimizer: str, episodic: bool) -> None:
    def memo(model: nn.Module, **options: object) -> petal.MEMO:
        return petal.MEMO(model, **(options | {"optimizer": STEP[optimizer]}))

    options = {"lr": RATES[optimizer] / 5, "augment": views, "episodic": episodic}
    adapter, golden, logits = golden_run("memo", memo, norm, optimizer, **options)
    case = "" if episodic else "on."
    assert close(logits, golden[f"{case}logits"])
    assert close(flat(adapter.adapted), golden[f"{case}weights"])
    quick, _, rough = golden_run("memo", memo, norm, optimizer, torch.float32, **options)
    assert quick.executor is not None
    size = golden[f"{case}logits"].abs().max()
    assert close(rough, golden[f"{case}logits"], 2e-4 * size)


@pytest.mark.parametrize("engine", [False, True])
def test_an_image_gets_the_answer_that_it_gets_alone(engine: bool) -> None:
    together, alone = (petal.MEMO(network(), 0.05, views=4, seed=3) for _ in range(2))
    if engine:
        together, alone = fast(together), fast(alone)
    x = images(10)
    one_by_one = torch.cat([alone(image) for image in x.split(1)])
    assert torch.equal(together(x), one_by_one)                     # random numbers are drawn image by image
    assert not torch.equal(petal.MEMO(network(), 0.05, views=4, seed=4)(x), one_by_one)
    other = petal.MEMO(network(), 0.05, views=4, augment=views)
    assert torch.equal(other(x).flip(0), other(x.flip(0)))          # no image is in the answer of another
    on = petal.MEMO(network(), 0.05, views=4, augment=views, episodic=False)
    assert not torch.allclose(on(x).flip(0), on(x.flip(0)), atol=1e-4)


def test_the_first_step_is_down_the_marginal_entropy() -> None:
    model, (x, *_) = inputs("group")
    adapter = petal.MEMO(model, 0.05, views=3, augment=views)
    before = {name: value.detach().clone().requires_grad_() for name, value in adapter.adapted.items()}
    p = torch.func.functional_call(adapter.model, before, (views(x[:1].expand(3, -1, -1, -1)),)).softmax(1).mean(0)
    gradients = torch.autograd.grad(-(p * p.log()).sum(), list(before.values()))
    adapter(x[:1])
    for value, old, gradient in zip(adapter.adapted.values(), before.values(), gradients, strict=True):
        assert close(value, old - 0.05 * gradient, 1e-12)           # plain SGD
    again = petal.MEMO(model, 0.05, views=3, augment=views, optimizer=sgd)
    again(x[:1])
    for value, old, gradient in zip(again.adapted.values(), before.values(), gradients, strict=True):
        assert close(value, old - 0.05 * 1.9 * gradient, 1e-12)     # the collection's


def test_views_are_drawn_for_each_copy() -> None:
    seen: list[Tensor] = []
    adapter = petal.MEMO(network(), views=6, augment=petal.Views(noise=0.0))
    assert adapter.augment == petal.Views(noise=0.0, per_sample=True)
    ready = petal.MEMO(network(), views=6)
    for method in (adapter, ready):
        draw = method.augment
        method.augment = lambda x, generator, draw=draw: seen.append(draw(x, generator)) or seen[-1]
        method(images(1))
    for made in seen:
        assert len(made) == 6
        assert all(not torch.allclose(made[0], other, atol=1e-3) for other in made[1:])


def test_what_adapts_and_the_share_of_own_statistics() -> None:
    def names(**options: object) -> set[str]:
        return set(petal.MEMO(network("vit"), **options).adapted)

    assert names() == {name for name, _ in network("vit").named_parameters()}
    other = {"cls_token", "positions", "attention.in_proj_weight", "attention.in_proj_bias"}
    assert names() - names(adapts="weights") == other
    assert names(adapts="conv") == names(adapts="norm") | {"patches.weight", "patches.bias"}
    assert names(adapts="norm") == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    x, still = images(3), {"lr": 0.0, "views": 2}
    source = petal.MEMO(network(), share=0, **still)(x)
    assert torch.allclose(source, petal.Source(network())(x), atol=1e-5)
    mixed = torch.cat([petal.BatchNorm(network(), share=0.4)(image) for image in x.split(1)])
    assert torch.allclose(petal.MEMO(network(), share=0.4, **still)(x), mixed, atol=1e-5)


def test_a_loss_that_is_not_finite_leaves_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = petal.MEMO(network(), views=2, augment=views)
    adapter(images(1))
    monkeypatch.setattr(petal.methods.memo, "marginal_entropy", lambda logits: logits.sum() * float("nan"))
    x = images(3, seed=1)
    source = petal.MEMO(network(), lr=0.0, views=2)(x)
    assert torch.allclose(adapter(x), source, atol=1e-5)
    assert adapter.skipped == 3
    assert all(torch.equal(value, adapter.origin()[name]) for name, value in adapter.adapted.items())


def test_what_makes_no_sense() -> None:
    wrong = {"views": 0, "share": 1.5, "steps": 0, "adapts": "some", "lr": -1.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} must be"):
            petal.MEMO(network(), **{name: value})
    with pytest.raises(ConfigError, match="it adapts to each image by itself"):
        petal.SmallBatch(petal.MEMO(network()))
    with pytest.raises(ConfigError, match="adapts 'norm' parameters and this network has none"):
        petal.MEMO(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), adapts="norm")
    with pytest.raises(ConfigError, match="keeps no running statistics"):
        petal.MEMO(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)))
    adapter = petal.MEMO(network())
    before = adapter.state_dict()
    with pytest.raises(InputError):
        adapter(images()[:, :2])
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())


def test_batch_norms_of_vectors_learn_by_the_mix_of_views_and_answer_one_image_by_the_source() -> None:
    def augment(x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 1.5, len(x))[:, None]

    torch.manual_seed(0)
    vectors = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    x = torch.rand(8, 4)
    still = petal.MEMO(vectors, lr=0.0, augment=augment)(x)
    assert torch.allclose(still, vectors(x), atol=1e-6)
    learned = [petal.MEMO(vectors, lr=0.1, share=share, augment=augment)(x) for share in (0.0, 0.5)]
    assert not torch.allclose(learned[0], still, atol=1e-3)
    assert not torch.allclose(learned[1], learned[0], atol=1e-3)
