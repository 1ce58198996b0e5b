"""Finds the integers and scales of weights that were quantized and dequantized.

A fake-quant file holds ``integer * scale`` rounded to float32, but not the factors. The integers follow from the
values. Several neighbouring float32 scales can give the same values; ``lowest_scale`` names one of them, and weights
that are written with that one are read back with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.numerics.affine import integer_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

BITS = 8
LARGEST = integer_range(BITS)[1]
_INT32 = torch.iinfo(torch.int32)
_NEIGHBOURS = range(-2, 3)
"""The scale lies within this many float32 steps of (largest weight) / (its integer)."""
_FIRST_VALUES, _CHUNK_VALUES = 2**12, 2**20


@dataclass(frozen=True)
class IntegerWeights:
    """The weights of one layer as integers.

    Attributes:
        integers: int8 ``[Cout, -1]``.
        scale: float32, ``[1]`` or ``[Cout]``.
    """

    integers: Tensor
    scale: Tensor


def find_integer_weights(rows: Tensor, bias: Tensor | None, scale_data: Tensor) -> IntegerWeights | None:
    """The integers and scales of int8 weights ``[Cout, -1]`` that were dequantized; None if they are on no grid.

    One scale for all rows is tried before one per row, and 127 as the largest integer before others, because these
    are what weights are quantized with. A row of zeros has scale 1.

    Args:
        rows: The dequantized weights.
        bias: ``[Cout]``: whole steps of ``scale * scale_data``, dequantized.
        scale_data: The scale of the data, one value.
    """
    rows = rows.detach().float()
    limits = torch.stack(torch.aminmax(rows))
    if not bool(torch.isfinite(limits).all()) or (bias is not None and not bool(torch.isfinite(bias).all())):
        return None
    for grid in _grids(rows):
        scale = _scale_for_bias(grid, bias, scale_data)
        if scale is not None:
            return IntegerWeights(grid.integers.reshape(rows.shape), scale)
    return None


def lowest_scale(integers: Tensor, scale: Tensor) -> Tensor:
    """The smallest float32 scales with which ``integers * scale`` rounds to the same float32 values.

    Only the next smaller number can be one: two steps change every product by at least one of its own steps.

    Args:
        integers: ``[Cout, -1]``.
        scale: ``[1]`` or ``[Cout]``.
    """
    rows = integers if scale.numel() > 1 else integers.reshape(1, -1)
    lower = torch.nextafter(scale, torch.zeros_like(scale))
    same = (rows != 0).any(dim=1)
    for columns in _chunks(rows):
        if not bool(same.any()):
            break
        part = rows[:, columns].float()
        same &= (part * lower[:, None] == part * scale[:, None]).all(dim=1)
    return torch.where(same, lower, scale)


def integer_bias(found: IntegerWeights, bias: Tensor, scale_data: Tensor) -> tuple[Tensor, Tensor]:
    """The int32 bias ``[Cout]`` and the steps of the sums with this data; a row of zeros has one step, its bias."""
    step = sum_scale(found.scale, scale_data).expand(len(bias))
    constant = ~(found.integers != 0).any(dim=1)
    integers = torch.where(constant, 1, bias_integers(bias, step))
    return integers.to(torch.int32), torch.where(constant, bias, step)


def bias_integers(bias: Tensor, sum_scale: Tensor) -> Tensor:
    """The int32 bias that a dequantized one stands for, in steps of ``sum_scale``.

    Integers above 2^23 are those that the 24 bits of a float32 can tell apart.
    """
    steps = torch.round(bias.double() / sum_scale.double())
    return steps.clamp(_INT32.min, _INT32.max).to(torch.int32)


@dataclass(frozen=True)
class _Grid:
    """Integers ``[rows, -1]`` and, by row, every scale that gives the row's values, ascending, filled up with NaN."""

    integers: Tensor
    scales: Tensor


def _grids(rows: Tensor) -> Iterator[_Grid]:
    """The grids that the weights may be on, the most likely one first."""
    usual, others = (LARGEST, LARGEST + 1), range(1, LARGEST)
    for values, largest in (
        (rows.reshape(1, -1), usual),
        (rows, usual),
        (rows.reshape(1, -1), others),
        (rows, (*usual, *others)),
    ):
        grid = _find(values, largest)
        if grid is not None:
            yield grid


def _scale_for_bias(grid: _Grid, bias: Tensor | None, scale_data: Tensor) -> Tensor | None:
    """Of the possible scales the smallest with which every bias is an integer; None if there is none."""
    if bias is None:
        return grid.scales[:, 0]
    steps = sum_scale(grid.scales, scale_data)
    known = torch.where(torch.isnan(steps), 1.0, steps)
    back = dequantized_bias(bias_integers(bias[:, None], known), steps)
    fits = back == bias[:, None]
    rows = grid.integers.reshape(len(bias), -1)
    fits |= ~(rows != 0).any(dim=1, keepdim=True)  # a row of zeros gives its bias with any scale
    fits &= ~torch.isnan(steps)
    if len(grid.scales) == 1:
        fits = fits.all(dim=0, keepdim=True)
    if not bool(fits.any(dim=1).all()):
        return None
    return _first(grid.scales, fits)


def sum_scale(scale_weight: Tensor, scale_data: Tensor) -> Tensor:
    """The step of sums of products: ``scale_weight * scale_data``, computed in float64 and rounded to float32."""
    return (scale_weight.double() * scale_data.double()).float()


def dequantized_bias(bias: Tensor, step: Tensor) -> Tensor:
    """An integer bias as float32, computed in float64."""
    return (bias.double() * step.double()).float()


def _find(rows: Tensor, largest_integers: Iterable[int]) -> _Grid | None:
    """The grid of every row, with its largest magnitude at the first of these integers that fits."""
    lowest, highest = torch.aminmax(rows, dim=1)
    bound = torch.maximum(-lowest, highest)
    integers = torch.zeros(rows.shape, dtype=torch.int8)
    scales = torch.full((len(rows), len(_NEIGHBOURS)), torch.nan)
    open_rows = (bound > 0).nonzero().reshape(-1)
    scales[bound == 0, 0] = 1.0
    for largest in largest_integers:
        if not open_rows.numel():
            break
        fits, scale = _fit(rows if len(open_rows) == len(rows) else rows[open_rows], bound[open_rows], largest)
        done = open_rows[fits]
        scales[done] = scale[fits]
        nearest = (bound[done] / largest)[:, None]
        chosen = slice(None) if len(done) == len(rows) else done  # an index would copy
        for columns in _chunks(rows):
            integers[chosen, columns] = (rows[chosen, columns] / nearest).round_().to(torch.int8)
        open_rows = open_rows[~fits]
    return None if open_rows.numel() else _Grid(integers, scales)


def _fit(rows: Tensor, bound: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Which rows are multiples of a scale with which their largest magnitude is ``largest``, and these scales."""
    nearest = bound / largest
    candidates = _neighbours(nearest)
    same = torch.ones_like(candidates, dtype=torch.bool)
    for columns in _chunks(rows):
        part = rows[:, columns]
        integers = (part / nearest[:, None]).round()
        same &= (integers <= LARGEST).all(dim=1, keepdim=True)
        for place in range(candidates.shape[1]):
            if bool(same[:, place].any()):
                same[:, place] &= (integers * candidates[:, place, None] == part).all(dim=1)
        if not bool(same.any()):
            break
    order = torch.where(same, candidates, torch.inf).sort(dim=1).values
    return same.any(dim=1), torch.where(torch.isinf(order), torch.nan, order)


def _neighbours(scale: Tensor) -> Tensor:
    """Float32 numbers next to each scale, ascending: ``[Cout, 5]``."""
    bits = scale.float().view(torch.int32)
    return torch.stack([(bits + step).view(torch.float32) for step in _NEIGHBOURS], dim=1)


def _first(candidates: Tensor, same: Tensor) -> Tensor:
    return candidates.gather(1, same.to(torch.int8).argmax(dim=1, keepdim=True)).squeeze(1)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of columns: a short one first, because weights that are on no grid show it at once."""
    start, values = 0, _FIRST_VALUES
    while start < rows.shape[1]:
        stop = start + max(1, values // max(1, rows.shape[0]))
        yield slice(start, stop)
        start, values = stop, _CHUNK_VALUES
