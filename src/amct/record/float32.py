"""Rounding to float32, the type of the factors in a record file."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from amct.errors import RecordValueError

if TYPE_CHECKING:
    from collections.abc import Iterable


def float32(value: float) -> float:
    """Return the float32 nearest to a number, as a Python float.

    >>> float32(0.1)
    0.10000000149011612
    """
    return float32s((value,))[0]


def float32s(values: Iterable[float]) -> tuple[float, ...]:
    """Return the float32 nearest to each number; infinity and NaN are unchanged.

    Raises:
        RecordValueError: A finite number is too large for float32, or is not a number.
    """
    numbers = tuple(values)
    layout = f"<{len(numbers)}f"
    try:
        return struct.unpack(layout, struct.pack(layout, *numbers))
    except OverflowError as error:
        largest = max((number for number in numbers if math.isfinite(number)), key=abs)
        raise RecordValueError(f"a factor is too large for float32: {largest:g}") from error
    except struct.error as error:
        raise RecordValueError(f"a factor must be a number, got {numbers!r}") from error
