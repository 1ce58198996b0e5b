"""Compiled functions compute what they say, with or without a place for their cache."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from amct.numerics.counts.compiled import compiled, compiled_sum


def total(values: np.ndarray) -> float:
    result = 0.0
    for value in values:
        result += value
    return result


@pytest.mark.parametrize("decorate", [compiled, compiled_sum])
def test_a_compiled_loop_gives_the_same_result(decorate):
    values = np.arange(1000.0)
    assert decorate(total)(values) == total(values)


def test_no_place_for_a_cache_is_no_error(monkeypatch, caplog):
    original = numba.njit

    def refuse(*, cache: bool = False, **options: object):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(**options)

    monkeypatch.setattr(numba, "njit", refuse)
    with caplog.at_level("INFO", "amct"):
        assert compiled(total)(np.ones(3)) == 3.0
    assert "total is compiled again in every process: cannot cache function" in caplog.text
