"""What cards say of methods is what the methods do."""

import inspect

import pytest
import torch

import petal
from methods.test_kinds_of_networks import made
from networks import images, network
from petal.errors import ConfigError
from petal.methods.card import AFFINE, NO_BATCH_NORM, Card
from petal.norm import affine_parameters

CARDS = {name: kind.card for name, kind in petal.METHODS.items() if kind.card is not None}


def test_every_method_has_a_card_with_a_paper() -> None:
    assert CARDS.keys() == petal.METHODS.keys()
    for card in CARDS.values():
        assert str(card.year) in card.paper
    assert len({card.title for card in CARDS.values()}) == len(CARDS)


@pytest.mark.parametrize("method", petal.METHODS)
def test_needs(method: str) -> None:
    known, needs = inspect.signature(petal.METHODS[method]).parameters, set(CARDS[method].needs)
    assert needs <= {"batch norm", "posterior", "prototypes", "fisher", "source data"}
    asked = "statistics" in known and known["statistics"].default is inspect.Parameter.empty
    assert asked <= bool(needs & {"prototypes", "fisher"}) <= ("statistics" in known)
    assert ("posterior" in needs) is ("posterior" in known)
    if "batch norm" in needs:
        with pytest.raises(ConfigError, match="this network has none"):
            petal.METHODS[method](network("group-norm"))
    elif not needs:
        petal.METHODS[method](network("group-norm"))


@pytest.mark.parametrize("method", petal.METHODS)
def test_what_adapts(method: str) -> None:
    adapter = made(method, 5, torch.float32)
    adapted = {name for name in adapter.adapted if not name.startswith("projector")}
    if CARDS[method].adapts == AFFINE:
        assert adapted <= set(affine_parameters(adapter.model))
        assert adapted
    elif CARDS[method].adapts == "all weights":
        assert adapted == {name for name, _ in adapter.model.named_parameters() if not name.startswith("projector")}


@pytest.mark.parametrize("method", petal.METHODS)
def test_what_suits_small_batches_takes_one_image(method: str) -> None:
    suits = CARDS[method].small_batches
    for norm in {True: ("batch", "group"), NO_BATCH_NORM: ("group",), False: ()}[suits]:
        adapter = made(method, 5, torch.float32, norm)
        assert all(adapter(images(1, seed)).isfinite().all() for seed in range(10))


def test_cells() -> None:
    card = Card("A", "B 2000", 2000, "nothing", ("fisher", "prototypes"), True, NO_BATCH_NORM)
    assert card.cells() == ("nothing", "fisher, prototypes", "yes", "without batch norm")
    assert Card("A", "B 2000", 2000, "nothing").cells() == ("nothing", "-", "-", "-")
