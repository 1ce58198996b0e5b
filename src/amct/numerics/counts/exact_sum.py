"""Exact sums of float32 numbers: the same bits in whatever order and in whatever parts they are added.

A sum is an integer in units of the smallest float32 number, 2^-149, held in digits of 32 bits: an int64 per digit, so
that 2^31 numbers can be added before a digit overflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amct.numerics.counts.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNIT = 149  # every float32 number is a multiple of 2^-149
_FRACTION = 23
_DIGIT = 32
_DIGITS = 10  # of float32 numbers up to 2^128, with room for the sign and the sum of 2^31 of them
_LOW = (1 << _DIGIT) - 1


class ExactSum:
    """The sums of many float32 vectors of one length, element by element."""

    def __init__(self, size: int) -> None:
        self.digits: NDArray[np.int64] = np.zeros((size, _DIGITS), np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Add a vector of finite float32 numbers."""
        add_exactly(np.ascontiguousarray(values, np.float32), self.digits)

    def merge(self, other: ExactSum) -> None:
        """Add the sums of ``other``."""
        self.digits = self.digits + other.digits

    def value(self) -> NDArray[np.float64]:
        """Return the sums in float64; their relative error is below 2^-51."""
        return _total(self.digits)


@compiled
def add_exactly(values: NDArray[Any], digits: NDArray[np.int64]) -> None:
    """Add a vector of finite float32 numbers to the digits of an ``ExactSum``."""
    bits = values.view(np.uint32)
    for row in range(bits.size):
        exponent = np.int64(bits[row] >> np.uint32(_FRACTION)) & 255
        fraction = np.int64(bits[row]) & ((1 << _FRACTION) - 1)
        whole, shift = (fraction | (1 << _FRACTION), exponent - 1) if exponent else (fraction, np.int64(0))
        moved = whole << (shift % _DIGIT)  # at most 24 + 31 bits
        moved = -moved if values[row] < 0 else moved
        digits[row, shift // _DIGIT] += moved & _LOW
        digits[row, shift // _DIGIT + 1] += moved >> _DIGIT


@compiled
def _total(digits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums that rows of digits stand for."""
    totals = np.empty(digits.shape[0])
    for row in range(digits.shape[0]):
        own = digits[row].copy()
        _carry(own)
        negative = own[-1] < 0
        if negative:
            own = -own
            _carry(own)
        total = 0.0
        for place in range(_DIGITS):  # all digits are positive now, so nothing cancels
            total += np.float64(own[place]) * 2.0 ** (_DIGIT * place - _UNIT)
        totals[row] = -total if negative else total
    return totals


@compiled
def _carry(digits: NDArray[np.int64]) -> None:
    """Bring all digits of a number but the last into 0..2^32 - 1."""
    for place in range(_DIGITS - 1):
        digits[place + 1] += digits[place] >> _DIGIT
        digits[place] &= _LOW
