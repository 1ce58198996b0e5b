"""Weights are worked on in row chunks: the result is that of the whole weight, in memory of one chunk."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.numerics import arq
from amct.numerics.rounding import _largest, round_cancelling_errors


@given(st.integers(1, 50), st.integers(1, 3 * arq.VALUES_PER_CHUNK))
def test_the_chunks_cover_every_row_once(rows, values):
    covered = [row for part in arq.row_chunks(rows, values) for row in range(part.start, part.stop)]
    assert covered == list(range(rows))


@given(hnp.arrays(np.float64, (4, 6), elements=st.sampled_from([-0.5, -0.25, 0.0, 0.25, 0.5])), st.data())
def test_the_largest_values_are_those_of_a_stable_sort(values, data):
    counts = np.array([[data.draw(st.integers(0, 6))] for _ in range(4)])
    order = np.argsort(-values, axis=1, kind="stable")
    expected = np.zeros_like(values, dtype=bool)
    np.put_along_axis(expected, order, np.arange(6) < counts, axis=1)
    assert np.array_equal(_largest(torch.tensor(values), torch.tensor(counts)).numpy(), expected)


def test_chunks_change_no_integer(monkeypatch):
    torch.manual_seed(0)
    weight, scale = torch.randn(37, 5, 3, 3), torch.rand(37) * 0.02 + 0.01
    whole = round_cancelling_errors(weight, scale, 8)
    monkeypatch.setattr(arq, "VALUES_PER_CHUNK", 100)
    assert torch.equal(round_cancelling_errors(weight, scale, 8), whole)


def test_the_largest_intermediate_result_is_a_chunk(monkeypatch):
    sizes = []
    weight = torch.randn(4096, 1024)

    def noted(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sizes.append(values.numel())
        return _largest(values, counts)

    monkeypatch.setattr("amct.numerics.rounding._largest", noted)
    round_cancelling_errors(weight, torch.tensor([0.03]), 8)
    assert sum(sizes) == weight.numel()
    assert max(sizes) <= arq.VALUES_PER_CHUNK
