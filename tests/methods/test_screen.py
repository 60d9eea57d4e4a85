"""Images that do not belong to a batch: the others keep their answers."""

import warnings

import pytest
import torch

import petal
from networks import images, network
from petal import ConfigError, InputError, PetalWarning, Screen


def spoilt(value: float, *rows: int) -> torch.Tensor:
    x = images(16)
    x[list(rows)] = value
    return x


@pytest.mark.parametrize("value", [1e4, -30.0, float("nan"), float("inf")])
@pytest.mark.parametrize("method", [petal.Tent, lambda model: petal.SmallBatch(petal.Tent(model))])
def test_the_others_keep_their_answers(value: float, method: type[petal.Adapter]) -> None:
    adapter, twin = Screen(method(network())), method(network())
    with pytest.warns(PetalWarning, match=r"images 2, 5 of a batch have values far outside .*set aside"):
        answers = adapter(spoilt(value, 2, 5))
    kept = [n for n in range(16) if n not in (2, 5)]
    given = images(16)[kept]
    expected = twin(torch.cat([given, given[:2]]) if adapter.by_batch else given)[:14]
    if adapter.by_batch:                        # in the places of the two are the first two of the others
        x = images(16)
        x[[2, 5]] = given[:2]
        expected = method(network())(x)[kept]
    assert torch.allclose(answers[kept], expected, atol=1e-5)
    source = network().eval()(spoilt(value, 2, 5)[[2, 5]])
    finite = value == value and abs(value) != float("inf")
    assert torch.allclose(answers[[2, 5]], source if finite else torch.zeros(2, 5), rtol=1e-4, atol=1e-4)
    assert adapter.aside == 2


def test_without_outliers_nothing_changes() -> None:
    adapter, twin = Screen(petal.Tent(network())), petal.Tent(network())
    for seed in range(3):
        x = images(seed=seed)
        assert torch.equal(adapter.predict(x), twin.predict(x))
        assert torch.equal(adapter(x), twin(x))
    assert adapter.aside == 0


def test_refuse_and_take() -> None:
    adapter = Screen(petal.Tent(network()), "refuse")
    adapter(images(16))
    before = adapter.state_dict()
    with pytest.raises(InputError, match=r"images 1 of the batch have values far outside those given so far \(0.*aside"):
        adapter(spoilt(1e4, 1))
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
    assert torch.equal(Screen(petal.Tent(network()), "take")(spoilt(1e4, 1)), petal.Tent(network())(spoilt(1e4, 1)))


def test_the_margin_and_the_range_given_so_far() -> None:
    adapter = Screen(petal.BatchNorm(network()), margin=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetalWarning)
        for value, aside in ((1.9, 0), (2.5, 1), (2.5, 2)):             # few images do not move the range
            adapter(spoilt(value, 0))
            assert adapter.aside == aside
        for _ in range(2):                                              # most of them do, as far as was allowed before
            adapter(images(16) * 1.9)
        adapter(spoilt(2.5, 0))
        assert adapter.aside == 2
        other = Screen(petal.BatchNorm(network()), margin=1.0)
        other.load_state_dict(adapter.state_dict())
        other(spoilt(2.5, 0))
        assert other.aside == 2
        adapter.reset()
        adapter(spoilt(2.5, 0))
    assert adapter.aside == 1


def test_a_batch_of_nothing_else_is_answered_by_the_source() -> None:
    adapter = Screen(petal.Tent(network()))
    adapter(images(16))
    before = {name: p.detach().clone() for name, p in adapter.adapted.items()}
    with pytest.warns(PetalWarning):
        answers = adapter(images(4) + 1e4)
    assert torch.allclose(answers, network().eval()(images(4) + 1e4), rtol=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in adapter.adapted.items())


def test_quarantine_keeps_pictures_and_copies_out() -> None:
    x = images(16)
    x[[1, 4]] = 1.0                                     # a white picture
    x[9] = x[8]                                         # a copy
    filled = x.clone()
    usual = [n for n in range(16) if n not in (1, 4, 9)]
    filled[[1, 4, 9]] = x[usual[:3]]
    adapter = Screen(petal.Tent(network()), quarantine=3.0)
    expected = petal.Tent(network())
    second = expected.predict(x)
    answers = adapter(x)
    assert adapter.quarantined == 3
    assert torch.allclose(answers[usual], expected(filled)[usual], atol=1e-5)
    assert torch.allclose(answers[[1, 4, 9]], second[[1, 4, 9]], atol=1e-5)
    assert torch.equal(Screen(petal.Tent(network()))(x), petal.Tent(network())(x))


def test_half_of_a_batch_is_not_put_in_quarantine() -> None:
    x = images(16)
    x[:8] = x[0]
    adapter = Screen(petal.Tent(network()), quarantine=3.0)
    assert torch.equal(adapter(x), petal.Tent(network())(x))


def test_keys_go_with_their_images() -> None:
    adapter, twin = (petal.SmallBatch(petal.Tent(network())) for _ in range(2))
    screen = Screen(adapter)
    keys = ["left", "right"] * 8
    with pytest.warns(PetalWarning):
        got = screen(spoilt(1e4, 3), stream=keys)
    rows = [n for n in range(16) if n != 3]
    assert torch.equal(got[rows], twin(images(16)[rows], stream=[keys[n] for n in rows]))


def test_a_guard_outside_asks_the_source_of_the_others() -> None:
    guard = petal.Guard(Screen(petal.Tent(network())), every=1)
    with pytest.warns(PetalWarning):
        guard(spoilt(1e4, 2))
    plain = petal.Guard(Screen(petal.Tent(network())), every=1)
    x = images(16)
    x[2] = x[0]
    plain(x)
    assert guard.status()["disagreement"] == plain.status()["disagreement"]


def test_settings_are_checked() -> None:
    for options, text in (({"outliers": "drop"}, "outliers must be one of"), ({"margin": -1}, "margin"),
                          ({"quarantine": 0.5}, "quarantine")):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            Screen(petal.Tent(network()), **options)
