"""Loops that torch and NumPy have no fused operation for, compiled by numba.

Compiled code is cached beside the source (or in the user's cache folder if that is not writable), so only the first run
on a machine compiles. The GIL is released: loops may run in several threads at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function when it is first called; the order of arithmetic is preserved."""
    return _compiled(function, reorder_sums=False)


def compiled_sum(function: Function) -> Function:
    """Compile as ``compiled`` does, but allow sums to be reordered and vectorized: faster, equal up to rounding."""
    return _compiled(function, reorder_sums=True)


def _compiled(function: Function, *, reorder_sums: bool) -> Function:
    fastmath = {"reassoc", "nsz"} if reorder_sums else False
    try:
        return cast("Function", numba.njit(cache=True, nogil=True, fastmath=fastmath)(function))
    except RuntimeError as error:  # numba found no writable folder
        logger.info("%s is compiled again in every process: %s", function.__qualname__, error)
        return cast("Function", numba.njit(nogil=True, fastmath=fastmath)(function))
