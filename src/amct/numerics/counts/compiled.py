"""Loops that torch and NumPy have no fused operation for, compiled by numba.

Compiled code is cached beside the source (or in the user's cache folder if that is not writable), so only the first run
on a machine compiles. The GIL is released: loops may run in several threads at once. numba itself is imported by the
first call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from types import FunctionType
from typing import Any, TypeVar, cast

from amct.memory import uncollected

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function when it is first called; the order of arithmetic is preserved."""
    return cast("Function", _Compiled(function, reorder_sums=False))


def compiled_sum(function: Function) -> Function:
    """Compile as ``compiled`` does, but allow sums to be reordered and vectorized: faster, equal up to rounding."""
    return cast("Function", _Compiled(function, reorder_sums=True))


@cache  # once in a process
def _say_compiling() -> None:
    """Explain the wait: the loops of one job take about ten seconds to compile."""
    logger.info("loops are compiled for this machine, which takes some seconds; later runs find them in a cache")


class _Compiled:
    """A function that numba compiles when it is first called."""

    def __init__(self, function: Callable[..., object], *, reorder_sums: bool) -> None:
        update_wrapper(self, function)
        self._function = function
        self._called = False
        self._fastmath = {"reassoc", "nsz"} if reorder_sums else False

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401  those of the function
        if self._called:
            return self._numba_function(*arguments)
        self._called = True
        with uncollected():  # numba, and what it imports, is loaded
            result = self._numba_function(*arguments)
        if self._numba_function.stats.cache_misses:
            _say_compiling()
        return result

    @cached_property
    def _numba_function(self) -> Any:  # noqa: ANN401  numba has no types
        import numba

        function = self._with_compiled_callees()
        try:
            compiled = numba.njit(cache=True, nogil=True, fastmath=self._fastmath)(function)
        except RuntimeError as error:  # numba found no writable folder
            logger.info("%s is compiled again in every process: %s", function.__qualname__, error)
            compiled = numba.njit(nogil=True, fastmath=self._fastmath)(function)
        return compiled

    def _with_compiled_callees(self) -> FunctionType:
        """The function with globals in which the compiled functions that it calls are those of numba."""
        function = cast("FunctionType", self._function)
        names = function.__globals__
        callees = {
            name: found._numba_function
            for name in function.__code__.co_names
            if isinstance(found := names.get(name), _Compiled)
        }
        if not callees:
            return function
        copy = FunctionType(function.__code__, {**names, **callees}, function.__name__, function.__defaults__)
        return cast("FunctionType", update_wrapper(copy, function))
