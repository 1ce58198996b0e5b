"""Rules of operations that make tensors; those that depend on no other tensor are computed while lowering."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.registry import rule
from amct.pytorch.onnx.lowering.rules.elementwise import Operand, as_value
from amct.pytorch.onnx.lowering.rules.shaping import expanded_to
from amct.pytorch.onnx.lowering.sizes import Size, is_static, static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer

_LARGEST = 2**18
_VALUES = {"zeros": 0, "ones": 1, "empty": 0}


def _filled(to: Writer, value: Operand) -> Value:
    one = as_value(to, value, to.dtype)
    if one.constant is not None and all(map(is_static, to.shape)):
        shape = static(to.shape, "a constant")
        if math.prod(shape) <= _LARGEST:
            return to.constant(one.constant.expand(shape).clone())
    return expanded_to(to, one, to.shape)


@rule("zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like",
      "empty_permuted")  # fmt: skip
def uniform(
    to: Writer,
    operator: str,
    size: Sequence[Size] = (),
    x: Value | None = None,
    dtype: torch.dtype | None = None,
    physical_layout: Sequence[int] = (),
) -> Value:
    """Zeros or ones; what has no defined values is zero."""
    del size, x, dtype, physical_layout
    return _filled(to, _VALUES[operator.removeprefix("new_").partition("_")[0]])


@rule("full", "new_full", "full_like")
def full(
    to: Writer,
    fill_value: Operand,
    size: Sequence[Size] = (),
    x: Value | None = None,
    dtype: torch.dtype | None = None,
) -> Value:
    """One value everywhere."""
    del size, x, dtype
    return _filled(to, fill_value)


@rule("scalar_tensor")
def number(to: Writer, s: Operand, dtype: torch.dtype | None = None) -> Value:
    """A number, or a size."""
    del dtype
    return as_value(to, s, to.dtype)


@rule("arange")
def counted(
    to: Writer,
    end: Number | torch.SymInt,
    start: Number | torch.SymInt = 0,
    step: Number = 1,
    dtype: torch.dtype | None = None,
) -> Value:
    """Numbers at equal distances, up to a size."""
    del dtype
    whole = all(isinstance(each, (int, torch.SymInt)) for each in (start, end, step))
    computed = torch.int64 if whole else to.dtype
    limits = [as_value(to, each, computed) for each in (start, end, step)]
    return to.cast(to.add("Range", *limits, dtype=computed), to.dtype)
