"""Compiled functions compute what they say, with or without a place for their cache."""

from __future__ import annotations

import subprocess
import sys

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


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import logging
logging.basicConfig(level="INFO")
import numpy as np
from two_loops import first, second
first(np.ones(3)), second(np.ones(3))
"""
LOOPS = """
from amct.numerics.counts.compiled import compiled

@compiled
def first(values):
    return values.sum()

@compiled
def second(values):
    return values.max()
"""


def test_the_first_run_says_once_what_it_waits_for_and_the_next_one_does_not(tmp_path):
    (tmp_path / "two_loops.py").write_text(LOOPS)
    code = SCRIPT.format(folder=str(tmp_path))
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert [text.count("loops are compiled for this machine") for text in said] == [1, 0]
