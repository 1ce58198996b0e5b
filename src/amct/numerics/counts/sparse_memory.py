"""Large arrays of zeros of which only the parts that are written to take memory."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sparse_zeros(size: int, dtype: Any) -> NDArray[Any]:  # noqa: ANN401  a type of NumPy
    """Return zeros in pages of their own, which the system provides when they are first written to.

    ``np.zeros`` may take them from the heap, where freed memory has to be cleared, and asks for huge pages.
    """
    number_of_bytes = size * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, whose anonymous memory is private
        return np.frombuffer(mmap.mmap(-1, number_of_bytes), dtype)
    memory = mmap.mmap(-1, number_of_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
