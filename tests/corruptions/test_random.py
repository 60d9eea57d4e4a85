import numpy as np
import pytest
import torch
from scipy import stats

from petal.corruptions.random import KeyedRandom, fold_text, mix, mix_int


def rng(n: int = 40, start: int = 0) -> KeyedRandom:
    return KeyedRandom(torch.arange(start, start + n))


def test_numbers_are_those_of_a_plain_python_computation() -> None:
    key, draw = 12345, 2
    base = mix_int(mix_int(key) + draw * 0xD1B54A32D192ED03)
    expected = [mix_int(base + i * 0x9E3779B97F4A7C15) for i in range(1, 6)]
    source = KeyedRandom(torch.tensor([key]))
    source.bits((3,))
    assert source.bits((10,))[0].numpy().view(np.uint64).tolist() == expected


def test_the_finaliser_is_splitmix64() -> None:
    # the first outputs of SplitMix64 from state 1234567, as published with the generator
    state, outputs = 1234567, []
    for _ in range(3):
        state += 0x9E3779B97F4A7C15
        outputs.append(mix_int(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("value", [0, 1, -1, 2**62, -(2**63), 987654321])
def test_tensor_and_integer_finalisers_agree(value: int) -> None:
    assert int(mix(torch.tensor([value]))[0]) & ((1 << 64) - 1) == mix_int(value)


def test_uniform_is_uniform() -> None:
    u = rng().uniform((50, 100)).numpy().ravel()
    assert 0 <= u.min() < u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    # the low bits, too
    low = (u * 2**24).astype(np.int64) % 256
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("word", [-(2**31), 2**31 - 1, 0])
def test_normal_is_finite_whatever_the_bits(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = torch.full((1, 8), word, dtype=torch.int32)
    monkeypatch.setattr(KeyedRandom, "_words", lambda self, count: halves.view(torch.int64))
    z = rng(1).normal((8,)).numpy()
    assert np.isfinite(z).all()
    share = max(word // 256 + 2**23, 0.5) / 2**24
    assert np.hypot(z[0, :4], z[0, 4:]) == pytest.approx(np.sqrt(-2 * np.log(share)), rel=1e-5)


def test_normal_is_normal() -> None:
    z = rng().normal((50, 101)).numpy().ravel()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(stats.kurtosis(z)) < 0.05
    halves = rng(2000).normal((2,)).numpy()  # the two of a Box-Muller pair
    assert abs(np.corrcoef(halves.T)[0, 1]) < 0.08
    assert abs(np.corrcoef((halves**2).T)[0, 1]) < 0.08


def test_integers_cover_the_range_evenly() -> None:
    k = rng().integers((3000,), -4, 3)
    assert k.dtype == torch.int64
    counts = torch.bincount(k.flatten() + 4)
    assert len(counts) == 7
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_keys_draws_and_places_are_independent() -> None:
    source = rng(64)
    first, second = source.uniform((512,)), source.uniform((512,))
    table = torch.cat((first, second)).double().numpy()
    correlation = np.corrcoef(table)[np.triu_indices(128, 1)]
    assert abs(correlation).max() < 5.2 / np.sqrt(512)
    assert abs(correlation.std() * np.sqrt(512) - 1) < 0.05
    neighbours = np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(table.size)


def test_one_flipped_key_bit_flips_half_of_the_bits() -> None:
    keys = torch.tensor([77] + [77 ^ (1 << b) for b in range(63)])
    bits = KeyedRandom(keys).bits((64,)).numpy().view(np.uint32)
    changed = np.unpackbits((bits[1:] ^ bits[:1]).view(np.uint8), axis=1).mean(axis=1)
    assert changed.min() > 0.44
    assert changed.max() < 0.56


def test_an_image_does_not_see_the_others() -> None:
    for name, arguments in (("uniform", ((3, 5),)), ("normal", ((3, 5),)), ("integers", ((3, 5), 0, 9))):
        together = getattr(rng(6), name)(*arguments)
        alone = torch.cat([getattr(rng(1, i), name)(*arguments) for i in range(6)])
        assert torch.equal(together, alone)


def test_text_folds_the_same_in_every_process() -> None:
    assert fold_text("fog") == 0x65E85760541642B0
    assert fold_text("fog") != fold_text("frost")
