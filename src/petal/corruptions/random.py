"""Random numbers that belong to an image: a keyed, counter-based generator in plain torch operations.

Every image has a 64-bit key. The numbers of draw d of an image are mix(mix(mix(key) + d * GAMMA_DRAW) + i * GAMMA) for
i = 1, 2, ..., where mix is a bijective finaliser on 64 bits (two multiplications, three xor-shifts: the output function
of SplitMix64, which passes BigCrush on such a Weyl sequence). Nothing depends on the images around it, on the chunk it
was processed in or on a state that has to be carried along; the integers are the same on every device.

torch has no unsigned 64-bit arithmetic, so all of it runs in int64, whose products and sums wrap around.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KeyedRandom", "fold_text", "mix", "mix_int"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_GAMMA_DRAW = 0xD1B54A32D192ED03
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_SHIFTS = (30, 27, 31)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix_int(value: int) -> int:
    """The finaliser on one Python integer (taken modulo 2^64); the result is unsigned."""
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _FIRST) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _SECOND) & _MASK
    return value ^ (value >> _SHIFTS[2])


def _xor_shift_(z: Tensor, shift: int) -> Tensor:
    return z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))  # int64 >> keeps the sign: mask it away


def _mix_(z: Tensor) -> Tensor:
    _xor_shift_(z, _SHIFTS[0]).mul_(_signed(_FIRST))
    _xor_shift_(z, _SHIFTS[1]).mul_(_signed(_SECOND))
    return _xor_shift_(z, _SHIFTS[2])


def mix(z: Tensor) -> Tensor:
    """The finaliser on every element of an int64 tensor."""
    return _mix_(z.clone())


def fold_text(text: str) -> int:
    """64 bits that stand for a piece of text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class KeyedRandom:
    """The random numbers of a batch of images, one key each.

    Every call takes the next draw number, so a procedure that makes its calls in a fixed order gets the same numbers for
    the same key. Shapes are those of one image; a leading dimension for the batch is added.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self._mixed = mix(keys)
        self._draw = 0

    def _words(self, count: int) -> Tensor:
        """int64 [N, count]: all 64 bits random."""
        self._draw += 1
        base = _mix_(self._mixed + _signed(self._draw * _GAMMA_DRAW))
        counter = torch.arange(1, count + 1, device=self.keys.device) * _signed(_GAMMA)
        return _mix_(base[:, None] + counter)

    def bits(self, shape: Sequence[int]) -> Tensor:
        """int32 [N, *shape]: all 32 bits random."""
        count = torch.Size(shape).numel()
        halves = self._words((count + 1) // 2).view(torch.int32)
        return halves[:, :count].reshape(-1, *shape)

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 [N, *shape], uniform on the 2^24 evenly spaced points of [low, high)."""
        unit = _unit(self.bits(shape))
        return unit if (low, high) == (0.0, 1.0) else unit.mul_(high - low).add_(low)

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """int64 [N, *shape], uniform on low..high-1 (by a 32-bit multiply and shift: bias below (high - low) / 2^32)."""
        unsigned = self.bits(shape).long().bitwise_and_(0xFFFFFFFF)
        return unsigned.mul_(high - low).bitwise_right_shift_(32).add_(low)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """float32 [N, *shape], standard normal (Box and Muller; the tails end at 5.9)."""
        count = torch.Size(shape).numel()
        halves = self._words((count + 1) // 2).view(torch.int32)
        radius, angle = halves[:, 0::2].bitwise_right_shift(8), halves[:, 1::2]
        radius = radius.float().add_(2.0**23).clamp_(min=0.5).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()      # no log of zero
        angle = _unit(angle).mul_(2.0 * torch.pi)
        pairs = torch.cat((radius * angle.cos(), radius.mul_(angle.sin_())), dim=1)
        return pairs[:, :count].reshape(-1, *shape)


def _unit(bits: Tensor) -> Tensor:
    """The upper 24 bits of an int32 as a float32 in [0, 1); every step is exact."""
    return bits.bitwise_right_shift(8).float().mul_(2.0**-24).add_(0.5)
