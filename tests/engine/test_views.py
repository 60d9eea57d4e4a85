"""Views on a CPU: images side by side in memory give the views that the plain code gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from petal.augment import Views
from petal.engine.policy import Policy
from petal.engine.views import Maker, made_together
from petal.methods.network import ViewSource


class Interpreted(Policy):
    def compiler(self, function: Callable[..., Any], inference: bool = False, one_thread: bool = False) -> Any:
        return function


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (4, 1, 7, 12), (1, 3, 9, 1), (3, 3, 1, 1)], ids=str)
def test_views_are_those_of_the_plain_code(shape: tuple[int, ...], per_sample: bool) -> None:
    views = Views(per_sample=per_sample, translate=0.2, degrees=(-90.0, 90.0), scale=(0.5, 1.5), sigma=(0.5, 2.0), noise=0.1)
    x = 1.4 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.2       # beyond [0, 1] too
    before = x.clone()
    make = Maker(views, Interpreted(), compiled=True).of(x)
    random = torch.Generator().manual_seed(1)
    for _ in range(12):                                                                 # colours come in any order
        drawn = views.draw(x, random)
        made = make(drawn)
        assert made.shape == x.shape
        torch.testing.assert_close(made, views.apply(x, *drawn), rtol=0, atol=5e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3, 4], [1, 3], [4], []])
def test_a_share_of_the_views_made_together_leaves_random_numbers_in_step(wanted: list[int]) -> None:
    """Where others make the other views, their numbers are drawn all the same."""
    x, views = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)), Views(per_sample=True)
    every, random = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = [views.apply(x, *views.draw(x, every)) for _ in range(5)]
    made = list(made_together(ViewSource(x, views, 5, random), wanted))
    torch.testing.assert_close(made, [expected[number] for number in wanted])
    assert torch.equal(random.get_state(), every.get_state())


def test_compiled_views_are_the_same() -> None:
    """On one thread; those of several threads are compared as a part of the step, in test_engine.py."""
    views, x = Views(), torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    make = Maker(views, Policy(compile=True), compiled=True).of(x)
    drawn = views.draw(x, torch.Generator().manual_seed(1))
    torch.testing.assert_close(make(drawn), views.apply(x, *drawn), rtol=0, atol=5e-6)
