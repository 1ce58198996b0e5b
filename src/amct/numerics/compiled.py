"""Loops that torch and NumPy have no fused operation for, compiled by numba.

Compiled code is cached beside the source (or in the user's cache folder when that is not writable), so only the first
run on a machine pays for compiling. The GIL is released: loops may run in several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The same function as machine code, compiled when first called; arithmetic stays in the order written."""
    return cast("Function", numba.njit(cache=True, nogil=True)(function))


def compiled_sum(function: Function) -> Function:
    """Like ``compiled``, for a loop whose sums may be reordered into vector lanes: a rounding apart, much faster."""
    return cast("Function", numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})(function))
