import math

import pytest
import torch
from torch import Tensor

import petal
from oracle.temporal import corrected
from petal import TemporalPrior


def some(count: int = 60, classes: int = 5, sharp: float = 3.0, seed: int = 0) -> Tensor:
    """Logits of labels that come in runs of about eight, by a network that is often sure and wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) // 8 % classes
    noise = torch.randn(count, classes, generator=generator)
    return sharp * (torch.nn.functional.one_hot(labels, classes) + noise).double()


def test_the_answers_are_those_of_the_algorithm() -> None:
    logits = some(600)
    expected = torch.tensor(corrected(logits.tolist()), dtype=torch.float64).log()
    torch.testing.assert_close(TemporalPrior()(logits), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 10, 200])
def test_the_answers_do_not_depend_on_the_batch_size(size: int) -> None:
    logits, prior = some(400), TemporalPrior()
    parts = torch.cat([prior(part) for part in logits.split(size)])
    torch.testing.assert_close(parts, TemporalPrior()(logits), rtol=0, atol=1e-12)


def test_answers_changes_nothing_and_says_what_a_call_returns() -> None:
    prior = TemporalPrior()
    prior(some(50))
    before = prior.state_dict()
    said = prior.answers(some(20, seed=1), "other")
    assert all(torch.equal(value, before[name]) for name, value in prior.state_dict().items())
    assert torch.equal(said, prior(some(20, seed=1), "other"))


def test_a_state_goes_on_exactly_and_another_one_is_refused() -> None:
    prior, other = TemporalPrior(), TemporalPrior()
    prior(some(50), ["a", 3] * 25)
    other.load_state_dict(prior.state_dict())
    assert torch.equal(prior(some(9), "a"), other(some(9), "a"))
    assert torch.equal(prior(some(9), 3), other(some(9), 3))
    state = prior.state_dict()
    for wrong in (
        {},
        state | {"keys": torch.zeros(3, dtype=torch.uint8)},
        {k: v for k, v in state.items() if k != "mean"},
        state | {"belief": state["belief"][:1]},
    ):
        with pytest.raises(petal.ConfigError):
            other.load_state_dict(wrong)
    assert torch.equal(prior(some(9), "a"), other(some(9), "a"))


def test_each_source_of_images_has_a_past_of_its_own_and_the_bias_is_common() -> None:
    one, two, both = some(60), some(60, seed=1), TemporalPrior()
    mixed, keys = torch.stack([one, two], 1).flatten(0, 1), ["a", "b"] * 60
    answers = torch.cat([both(mixed[at : at + 30], keys[at : at + 30]) for at in range(0, 120, 30)])
    expected = torch.tensor(corrected(mixed.tolist(), keys), dtype=torch.float64).log()
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-10)


def test_the_source_not_heard_of_for_longest_is_forgotten() -> None:
    prior = TemporalPrior(streams=2)
    for key in ("a", "b", "a", "c"):                    # b goes
        prior(some(20), key)
    assert prior.state_dict()["recent"].shape[0] == 2
    assert torch.equal(prior.answers(some(20), "b"), prior.answers(some(20), "never heard of"))
    assert not torch.equal(prior.answers(some(20), "a"), prior.answers(some(20), "b"))


def test_what_is_not_finite_comes_back_as_it_is_and_is_not_learned_from() -> None:
    logits = some(40)
    bad = torch.cat([logits[:20], torch.full((1, 5), math.nan), torch.full((1, 5), math.inf), logits[20:]])
    prior = TemporalPrior()
    answers = prior(bad)
    good = torch.cat([answers[:20], answers[22:]])
    torch.testing.assert_close(good, TemporalPrior()(logits), rtol=0, atol=1e-12)
    assert bool(answers[20].isnan().all())
    assert bool(answers[21].isinf().all())


def test_thousands_of_certain_images_leave_all_numbers_finite() -> None:
    prior = TemporalPrior()
    one = torch.tensor([[1e4, 0.0, -1e4]]).expand(5000, 3)
    assert bool(prior(one).isfinite().all())
    answers = prior(one.flip(1)[:10])
    assert bool(answers.isfinite().all())
    assert answers.argmax(1).tolist()[-1] == 2
    assert all(bool(value.isfinite().all()) for value in prior.state_dict().values())


def test_looking_back_corrects_the_first_of_a_run_and_learns_the_same() -> None:
    run = torch.tensor([[0.1, 0.0], *[[3.0, 0.0]] * 10, [0.0, 0.1], *[[0.0, 3.0]] * 10])
    causal, back = TemporalPrior(), TemporalPrior(look_back=True)
    assert causal(run).argmax(1)[11] == 0
    assert back(run).argmax(1)[11] == 1
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in causal.state_dict().items())


def test_looking_back_is_a_pass_from_the_end() -> None:
    logits = some(200)
    expected = torch.tensor(corrected(logits.tolist(), look_back=True), dtype=torch.float64).log()
    torch.testing.assert_close(TemporalPrior(look_back=True)(logits), expected, rtol=0, atol=1e-10)


def test_mistaken_input_is_refused_by_name() -> None:
    prior = TemporalPrior()
    prior(some(4))
    with pytest.raises(petal.InputError, match="each of the 4 images; got 3 keys"):
        prior(some(4), ["a", "b", "c"])
    with pytest.raises(petal.InputError, match="6 classes and those before of 5"):
        prior(some(4, classes=6))
    with pytest.raises(petal.InputError, match=r"\[5\]"):
        prior(some(4)[0])
    with pytest.raises(petal.ConfigError, match="streams"):
        TemporalPrior(streams=0)


def test_it_says_how_sure_it_is_that_there_is_no_order() -> None:
    prior, shuffled = TemporalPrior(), some(200)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert prior.unordered(10) == 0                                 # nothing is known
    prior(shuffled, "mixed")
    prior(some(200), "runs")
    assert prior.unordered(10, "mixed") > 0.9
    assert 0 < prior.unordered(10, "runs") < 0.1
    assert prior.unordered(2, ["mixed", "runs"]) == prior.unordered(10, "runs")
    assert prior.unordered(2, ["mixed", "new"]) == 0
