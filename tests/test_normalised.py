"""Networks that take normalised images: the numbers of the normalisation inside, and a warning where it was missed."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ENGINES
from networks import images, network
from petal.engine import Policy
from petal.models import Normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalised(x: Tensor) -> Tensor:
    return (x - x.new_tensor(MEAN).view(3, 1, 1)) / x.new_tensor(STD).view(3, 1, 1)


class Inside(nn.Module):
    """The same network with the normalisation inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.normalize, self.inner = Normalize(MEAN, STD), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.normalize(x))


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_view_of_normalised_images_is_the_normalised_view(per_sample: bool) -> None:
    x, views = images(dtype=torch.float64), petal.Views(per_sample=per_sample)
    given = petal.Views(per_sample=per_sample, mean=MEAN, std=STD)
    one, other = (
        view(batch, generator=torch.Generator().manual_seed(3)) for view, batch in ((views, x), (given, normalised(x)))
    )
    torch.testing.assert_close(other, normalised(one), rtol=1e-9, atol=1e-9)
    assert given(normalised(x).float()).dtype == torch.float32
    grey = petal.Views(mean=0.5, std=0.25)
    assert grey((images()[:, :1] - 0.5) / 0.25).min() >= -2


@pytest.mark.parametrize("kind", ["petal", "cotta", "roid", "rotta"])
def test_both_ways_to_normalise_give_the_same_numbers(kind: str) -> None:
    options: dict[str, object] = {"views": 3, "confidence": 2.0} if kind in ("petal", "cotta") else {}
    options |= {"petal": {"prior_weight": 0}, "rotta": {"every": 12}}.get(kind, {})
    inner = network(dtype=torch.float64)
    inside = petal.METHODS[kind](Inside(inner).double(), augment=petal.Views(), **options)
    outside = petal.METHODS[kind](inner, augment=petal.Views(mean=MEAN, std=STD), **options)
    for seed in range(3):
        x = images(seed=seed, dtype=torch.float64)
        torch.testing.assert_close(outside(normalised(x)), inside(x), rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(p, outside.origin()[name]) for name, p in outside.adapted.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_adapt_is_told_of_the_normalisation(engine: str) -> None:
    inside = petal.accelerate(petal.adapt(Inside(network()), engine="eager"), engine, policy=Policy())
    outside = petal.accelerate(petal.adapt(network(), normalised=(MEAN, STD), engine="eager"), engine, policy=Policy())
    x = images()
    torch.testing.assert_close(outside(normalised(x)), inside(x), rtol=1e-4, atol=1e-4)
    assert outside.augment == petal.Views(per_sample=True, mean=MEAN, std=STD)
    for other in ({"images": False}, {"augment": petal.Views()}):
        with pytest.raises(petal.ConfigError, match="normalised is said of images with the usual views"):
            petal.adapt(network(), normalised=(MEAN, STD), **other)


COMPILED = Policy(compile=True, compile_after=1, backend="eager")


@pytest.mark.parametrize("policy", [Policy(), Policy(view_threads=2), COMPILED])
def test_the_engine_makes_the_same_views(policy: Policy) -> None:
    options = {"views": 4, "confidence": 2.0, "prior_weight": 0, "augment": petal.Views(mean=MEAN, std=STD)}
    plain, fast = (petal.Petal(network(), **options) for _ in range(2))
    petal.accelerate(fast, policy=policy)
    for seed in range(2):
        x = normalised(images(seed=seed))
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


def test_the_first_images_that_are_no_pixels_are_warned_of_once() -> None:
    adapter = petal.Petal(network(), views=2, confidence=2.0, prior_weight=0)
    with pytest.warns(petal.PetalWarning, match=r"lie between -2\.\d+ and 2\.\d+. For a network .* augment=Views\(mean"):
        adapter(normalised(images()))
    adapter(normalised(images(seed=1)))             # a second warning would be an error
    with pytest.warns(petal.PetalWarning, match=r"after mean=.* are undone"):
        petal.Views(mean=MEAN, std=STD).look(normalised(images()) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        petal.Petal(network(), views=2, confidence=2.0, prior_weight=0)(images())
        petal.Petal(network(), views=0, prior_weight=0)(normalised(images()))       # no views, nothing to warn of
        petal.Petal(network(), views=2, confidence=2.0, prior_weight=0, augment=lambda x: x)(normalised(images()))


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        (MEAN, None, "both mean and std"), (MEAN, (0.1, 0.1, 0.0), "std above 0"), ((1, 2), (1, 1), "1 or 3 finite"),
        ((math.nan,), (1,), "1 or 3 finite"),
    ],
)  # fmt: skip
def test_impossible_normalisations(mean: object, std: object, words: str) -> None:
    with pytest.raises(petal.ConfigError, match=words):
        petal.Views(mean=mean, std=std)


def test_views_stay_a_value() -> None:
    assert petal.Views(mean=list(MEAN), std=torch.tensor(STD, dtype=torch.float64)) == petal.Views(mean=MEAN, std=STD)
    assert len({petal.Views(mean=MEAN, std=STD), petal.Views(mean=list(MEAN), std=STD)}) == 1
