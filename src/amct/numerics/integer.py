"""Exact integer convolution and matrix product, the check for overflow of int32, and integers of dequantized weights.

torch has no integer convolution, but floating point adds integers exactly while every sum is at most 2^24 (float32) or
2^53 (float64). Any partial sum of products ``x · w`` of one output channel is at most ``max|x| · Σ|w|``; this bound,
computed from the actual tensors, selects the type. No operation rounds then, fused multiply-add included.

This holds for kernels that only multiply and add. Kernels that transform first (Winograd, FFT) round: float32 is used
on the CPU only, with convolutions passed as 3-d ones: NNPACK and the depthwise Winograd kernel support 2-d only, oneDNN
computes directly, and the fallback is a matrix product. On other devices, and where the caller lets torch reduce the
precision of float32 products, float64 is used and rounded, because the error of a transform is far below 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.affine import integer_range
from amct.numerics.arq import WeightKind, channels_first, row_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EXACT_FLOAT32 = 2**24
_EXACT_FLOAT64 = 2**53
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, kw_only=True)
class ConvolutionGeometry:
    """Parameters of a convolution: one number for all dimensions, or one per dimension, as in ``torch.nn``."""

    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int | tuple[int, ...] = 0


_PLAIN = ConvolutionGeometry()

_LARGE_SAMPLE = 2**17
"""So many values are worth a convolution of their own."""


def integer_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    geometry: ConvolutionGeometry = _PLAIN,
    offset: int = 0,
) -> Tensor:
    """Convolution (1-d, 2-d, 3-d, grouped, transposed) of ``x - offset`` with integer weights, exact.

    Args:
        x: integers ``[N, Cin, ...]``; padding has the value ``offset``, which represents zero.
        weight: integers in the layout of Conv or ConvTranspose.
        bias: integers ``[Cout]``.
        geometry: stride, padding, dilation and groups.
        offset: the integer that represents zero.

    Returns:
        The sums: int32 if the bound shows that every sum fits, else int64.

    Raises:
        ArgumentTypeError: a tensor is not of integers.
        ArgumentError: shapes do not fit, or the sums could exceed 2^53.
    """
    _check_integers(x=x, weight=weight, bias=bias)
    if x.ndim != weight.ndim or not 3 <= x.ndim <= 5:
        raise ArgumentError(
            f"expected x [N, Cin, ...] and a weight with as many dimensions (3..5), got shapes {list(x.shape)} "
            f"and {list(weight.shape)}"
        )
    kind = WeightKind.CONV_TRANSPOSE if geometry.transposed else WeightKind.CONV
    bound = _largest_magnitude(x, offset) * _largest_row_sum(channels_first(weight, kind, geometry.groups))
    dtype = _exact_dtype(bound, x.device)
    weight = weight.to(dtype)

    def convolved(some: Tensor) -> Tensor:
        return _with_bias(_convolve(_moved(some, dtype, offset), weight, geometry), bias, bound, channel_axis=1)

    if x.numel() < _LARGE_SAMPLE * len(x) or len(x) == 1:
        return convolved(x)
    first = convolved(x[:1])  # one sample at a time: there are three more tensors of its size for a moment
    sums = first.new_empty(len(x), *first.shape[1:])
    for index, place in enumerate(sums):
        place.copy_(convolved(x[index : index + 1])[0] if index else first[0])
    return sums


def integer_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, offset: int = 0) -> Tensor:
    """Compute ``(x - offset) @ weight.T + bias`` exactly on integers ``[..., Cin]``, ``[Cout, Cin]``: int32 or int64.

    Raises:
        ArgumentTypeError: a tensor is not of integers.
        ArgumentError: shapes do not fit, or the sums could exceed 2^53.
    """
    _check_integers(x=x, weight=weight, bias=bias)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"expected x [..., Cin] and a weight [Cout, Cin], got {list(x.shape)} and {list(weight.shape)}"
        )
    bound = _largest_magnitude(x, offset) * _largest_row_sum(weight)
    dtype = _exact_dtype(bound, x.device)
    moved = _moved(x, dtype, offset)
    sums = torch.cat([functional.linear(moved, some) for some in _converted_rows(weight, dtype)], dim=-1)
    return _with_bias(sums, bias, bound, channel_axis=-1)


@dataclass(frozen=True)
class AccumulatorRange:
    """Smallest and largest sum of each output channel, int64 ``[Cout]``."""

    lowest: Tensor
    highest: Tensor

    @property
    def overflowing(self) -> tuple[int, ...]:
        """The output channels whose sums exceed int32."""
        outside = (self.lowest < _INT32.min) | (self.highest > _INT32.max)
        return tuple(outside.nonzero().reshape(-1).tolist())


def worst_case_accumulator(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: WeightKind,
    groups: int = 1,
    bits: int = 8,
    offset: int = 0,
) -> AccumulatorRange:
    """Return the range of sums that any data of ``bits`` bits can produce with these integer weights.

    For a transposed convolution this is an upper bound: an output position uses only some of its channel's weights.

    Raises:
        ArgumentTypeError: weight or bias are not integers.
        ArgumentError: the bias does not fit the weight.
    """
    _check_integers(weight=weight, bias=bias)
    lowest, highest = integer_range(bits)
    low, high = lowest - offset, highest - offset
    rows = channels_first(weight, kind, groups)
    _check_bias(bias, len(rows))
    sums = [(some.sum(dim=1), some.clamp_(min=0).sum(dim=1)) for some in _converted_rows(rows, torch.int64)]
    total, positive = (torch.cat(each) for each in zip(*sums, strict=True))
    negative = total - positive
    shift = torch.zeros_like(positive) if bias is None else bias.to(torch.int64)
    return AccumulatorRange(low * positive + high * negative + shift, high * positive + low * negative + shift)


def _converted_rows(rows: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Some rows at a time in a wider type, each in the memory of those before: a large weight is not copied."""
    memory: Tensor | None = None
    for part in row_chunks(len(rows), rows.numel()):
        some = rows[part]
        if memory is None:
            memory = torch.empty(some.shape, dtype=dtype, device=rows.device)
        yield memory[: len(some)].copy_(some)


def _convolve(x: Tensor, weight: Tensor, geometry: ConvolutionGeometry) -> Tensor:
    dimensions = x.ndim - 2
    stride, padding, dilation, output_padding = (
        _per_dimension(value, dimensions)
        for value in (geometry.stride, geometry.padding, geometry.dilation, geometry.output_padding)
    )
    extra = 3 - dimensions if x.dtype is torch.float32 and not geometry.transposed else 0  # see the module docstring
    for _ in range(extra):
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    sums = torch.convolution(
        x,
        weight,
        None,
        [1] * extra + stride,
        [0] * extra + padding,
        [1] * extra + dilation,
        geometry.transposed,
        [0] * extra + output_padding,
        geometry.groups,
    )
    return sums.reshape(*sums.shape[:2], *sums.shape[2 + extra :])


def _moved(x: Tensor, dtype: torch.dtype, offset: int) -> Tensor:
    """``x - offset`` of integers, as floating-point numbers."""
    moved = x.to(dtype)  # a copy, which may be changed
    return moved.sub_(offset) if offset else moved


def _per_dimension(value: int | tuple[int, ...], dimensions: int) -> list[int]:
    values = [value] * dimensions if isinstance(value, int) else list(value)
    if len(values) != dimensions:
        raise ArgumentError(f"geometry: expected 1 or {dimensions} numbers, got {values}")
    return values


def _largest_magnitude(x: Tensor, offset: int) -> int:
    """Return ``max|x - offset|``."""
    if x.numel() == 0:
        return 0
    low, high = torch.aminmax(x)
    return max(abs(int(low) - offset), abs(int(high) - offset))


def _largest_row_sum(rows: Tensor) -> int:
    """The largest sum of magnitudes of a row."""
    return max(int(some.abs_().sum(dim=1).max()) for some in _converted_rows(rows, torch.float64))


def _exact_dtype(bound: int, device: torch.device) -> torch.dtype:
    if bound <= _EXACT_FLOAT32 and device.type == "cpu" and _float32_is_full_precision():
        return torch.float32
    if bound <= _EXACT_FLOAT64:
        return torch.float64
    raise ArgumentError(f"sums up to {bound} exceed 2^53 and cannot be added exactly; split the layer's inputs")


def _float32_is_full_precision() -> bool:
    """Whether torch computes float32 products in full float32 precision, which is its default."""
    onednn = torch.backends.mkldnn
    settings = [getattr(getattr(onednn, name, None), "fp32_precision", "none") for name in ("conv", "matmul")]
    return torch.get_float32_matmul_precision() == "highest" and all(each in ("none", "ieee") for each in settings)


def _with_bias(sums: Tensor, bias: Tensor | None, bound: int, *, channel_axis: int) -> Tensor:
    """Convert exact float sums to integers and add the bias."""
    if bias is not None:
        _check_bias(bias, sums.shape[channel_axis])
        bound += _largest_magnitude(bias, 0)
    dtype = torch.int32 if bound <= _INT32.max else torch.int64
    integers = sums.round_().to(dtype)
    if bias is None:
        return integers
    shape = [1] * sums.ndim
    shape[channel_axis] = -1
    return integers.add_(bias.to(dtype).reshape(shape))


def _check_bias(bias: Tensor | None, outputs: int) -> None:
    if bias is not None and bias.shape != (outputs,):
        raise ArgumentError(f"bias: expected shape [{outputs}], got {list(bias.shape)}")


def _check_integers(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype is torch.bool):
            raise ArgumentTypeError(f"{name}: expected integers, got {tensor.dtype}")


# -- The integers and scales of weights that were quantized and dequantized --------------------------------------------
#
# A fake-quant file holds ``integer * scale`` rounded to float32, but not the factors. The integers follow from the
# values. Several neighbouring float32 scales can give the same values; ``lowest_scale`` names one of them, and weights
# that are written with that one are read back with it.


BITS = 8
LARGEST = integer_range(BITS)[1]
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
