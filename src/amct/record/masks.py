"""The 4:2 mask of a layer as the integers stored in a record, 64 mask bits each.

The mask is flattened row by row, packed eight to a byte with the first in the highest bit, padded with zero bytes to a
multiple of eight, and each eight bytes are read as one little-endian int64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from amct.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_BITS = 64


def pack_mask(mask: NDArray[np.generic]) -> tuple[int, ...]:
    """Pack a mask of zeros and ones, of any shape and number type, to integers of 64 bits.

    >>> pack_mask(np.array([[1, 0, 0, 1], [0, 1, 1, 0]]))
    (150,)
    """
    packed = np.packbits(np.asarray(mask).reshape(-1) != 0)
    padded = np.zeros(-(-packed.size // 8) * 8, dtype=np.uint8)
    padded[: packed.size] = packed
    return tuple(padded.view("<i8").tolist())


def unpack_mask(numbers: Sequence[int], shape: Sequence[int]) -> NDArray[np.bool_]:
    """Unpack a mask to a boolean array of ``shape``.

    Raises:
        RecordError: The shape is invalid or does not fit the number of integers.
    """
    size = math.prod(shape)
    if size < 0 or any(extent < 0 for extent in shape):
        raise RecordError(f"a mask cannot have the shape {list(shape)}")
    expected = -(-size // _BITS)
    if len(numbers) != expected:
        raise RecordError(
            f"a mask of shape {list(shape)} has {size} bits, that is {expected} numbers of 64; got {len(numbers)}"
        )
    try:
        bits = np.unpackbits(np.array(numbers, dtype="<i8").view(np.uint8), count=size)
    except OverflowError as error:
        raise RecordError("a number of the mask does not fit 64 bits") from error
    return bits.astype(np.bool_).reshape(tuple(shape))
