from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import petal
from guard.scripted import Scripted, batch
from networks import images, network
from petal import Guard, Ordered, SmallBatch, TemporalPrior, checks
from petal.checks.factory import Factory
from petal.recipes.published import cifar10
from petal.recipes.rows import WRAPPERS, pick_rows, rows
from petal.recipes.settings import apply_settings

AROUND: dict[str, tuple[Callable[..., petal.Adapter], list[type[petal.methods.Wrapper]]]] = {
    "source+order": (petal.Source, [Ordered]),
    "tent+order+guard": (petal.Tent, [Ordered, Guard]),
    "tent+guard+order": (petal.Tent, [Guard, Ordered]),
}
CHECKS = [
    pytest.param(check, id=f"{name}: {check}")
    for name, (method, around) in AROUND.items()
    for check in checks.check_method(Factory(method, around), networks=["batch-norm"], engines=["plain"])
]


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_promises_of_every_method(check: checks.Check) -> None:
    try:
        check()
    except checks.NotApplicable as reason:
        pytest.skip(str(reason))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_answers_are_the_methods_own_under_the_prior() -> None:
    plain, ordered, prior = petal.Tent(network()), Ordered(petal.Tent(network())), TemporalPrior()
    for seed in range(3):
        x = images(seed=seed)
        expected = prior(plain(x))
        assert torch.equal(ordered(x), expected)
    assert same(plain.state_dict(), ordered.adapter.state_dict())


@pytest.mark.parametrize("around", [lambda a: Ordered(a), lambda a: Guard(Ordered(a)), lambda a: Ordered(Guard(a))])
def test_keys_reach_the_prior(around: Callable[[petal.Adapter], petal.Adapter]) -> None:
    keys = ["left", "right"] * 6
    adapter, prior = around(petal.Source(network())), TemporalPrior()
    source = petal.Source(network())
    for seed in range(3):
        logits = source(images(seed=seed))
        predicted = adapter.predict(images(seed=seed), stream=keys)
        answers = adapter(images(seed=seed), stream=keys)
        assert torch.equal(predicted, answers)
        assert torch.equal(answers, prior(logits, keys))


@pytest.mark.parametrize("keys", [["a"], 1.5, True, [0.5] * 12, torch.zeros(3)])
def test_keys_that_are_none_are_refused_before_anything_changes(keys: object) -> None:
    adapter = Ordered(petal.Tent(network()))
    adapter(images())
    before = adapter.state_dict()
    for call in (adapter, adapter.predict):
        with pytest.raises(petal.InputError, match="stream"):
            call(images(), stream=keys)
    assert same(before, adapter.state_dict())


def test_keys_may_be_arrays_and_tensors() -> None:
    numbers = torch.arange(12) % 3
    expected = Ordered(petal.Source(network()))(images(), stream=numbers.tolist())
    for keys in (numbers, numbers.numpy(), tuple(numbers.tolist())):
        assert torch.equal(Ordered(petal.Source(network()))(images(), stream=keys), expected)


def test_methods_without_order_take_keys_and_make_no_use_of_them() -> None:
    for make in (petal.Tent, petal.NOTE, lambda m: SmallBatch(petal.Tent(m)), lambda m: Guard(petal.Tent(m))):
        named, plain = make(network()), make(network())
        assert torch.equal(named.predict(images(), stream="a"), plain.predict(images()))
        assert torch.equal(named(images(), stream="a"), plain(images()))


def test_shuffled_switches_it_off() -> None:
    off, plain = Ordered(petal.Source(network()), shuffled=True), petal.Source(network())
    assert torch.equal(off(images()), plain(images()))
    assert torch.equal(off.predict(images()), plain.predict(images()))
    assert "off" in str(off)


def test_options_reach_the_prior() -> None:
    adapter = Ordered(petal.Source(network()), streams=1, look_back=True)
    answer, expected = adapter(images(), stream="a"), TemporalPrior(look_back=True)(petal.Source(network())(images()))
    assert torch.equal(answer, expected)
    adapter(images(), stream="b")
    assert len(adapter.state_dict()["order.recent"]) == 1
    assert "looks back" in str(adapter)


def test_it_goes_around_a_method_once() -> None:
    with pytest.raises(petal.ConfigError, match="already"):
        Ordered(Guard(Ordered(petal.Source(network()))))
    with pytest.raises(petal.ConfigError, match="streams"):
        Ordered(petal.Source(network()), streams=0)


def test_a_roll_back_takes_the_prior_along() -> None:
    guard = Guard(Ordered(Scripted()), every=1, window=200)
    for seed in range(10):
        guard(batch(seed, torch.zeros(40, dtype=torch.long)))
    assert len(guard.state_dict()["order.recent"]) == 1
    guard.rollback()
    assert "order.recent" not in guard.state_dict()
    assert torch.equal(guard.predict(batch(0)), TemporalPrior()(Scripted()(batch(0))))


def test_a_guard_judges_the_weights_by_answers_without_the_order() -> None:
    plain, ordered = Guard(Scripted(), every=1), Guard(Ordered(Scripted()), every=1)
    for seed in range(12):
        x = batch(seed, torch.full((40,), seed // 4), sure=1.0)
        assert not torch.equal(plain(x), ordered(x))
    state = ordered.state_dict()
    assert same(plain.state_dict(), {key: value for key, value in state.items() if "order." not in key})
    assert plain.status() == ordered.status()


def test_rows_have_it_between_the_small_batch_mode_and_the_guard() -> None:
    known = rows(cifar10())
    (row,) = pick_rows(apply_settings(known, ["order.look_back=true"], WRAPPERS), ["petal-f+small+order+guard"])
    assert row.wraps == ("small", "order", "guard")
    assert row.wrapper_options["order"] == {"look_back": True}
    with pytest.raises(petal.ConfigError, match=r"tent\+order\+guard"):
        pick_rows(known, ["tent+guard+order"])
