"""QuantizeLinear and DequantizeLinear in a model that ``torch.onnx.export`` is exporting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.weight_kind import WeightKind
from amct.pytorch.qat.single_op.onnx_operators import symbolic

if TYPE_CHECKING:
    from torch import Tensor

_MICROSOFT = "com.microsoft::"  # its operators take 16 bits in every opset, the standard ones from 21 on
_MICROSOFT_VERSION = 1


def quantize_and_dequantize(x: Tensor, scale: Tensor, offset: Tensor, axis: int | None = None) -> Tensor:
    """The pair of operators, for a tensor in an export.

    Args:
        x: the tensor.
        scale: 0-d, or one per element of ``axis``.
        offset: int8 or int16, of the same shape.
        axis: the axis of the scales; None: one scale.
    """
    wide = offset.dtype is torch.int16
    domain, version = (_MICROSOFT, _MICROSOFT_VERSION) if wide else ("", None)
    attributes = {} if axis is None else {"axis": axis}

    def operator(name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
        inputs = (given, scale, offset)
        return symbolic(f"{domain}{name}", inputs, attributes, dtype=dtype, shape=x.shape, version=version)

    return operator("DequantizeLinear", operator("QuantizeLinear", x, offset.dtype), x.dtype)


def quantize_weight(weight: Tensor, scale: Tensor, offset: Tensor, kind: WeightKind, groups: int) -> Tensor:
    """The pair of operators for a weight, with the axis of its output channels.

    Args:
        weight: in the layout of ``kind``.
        scale: ``[1]``, one per output channel, or one per gate of a recurrent layer.
        offset: int8, as many.
        kind: layout of the weight.
        groups: groups of a transposed convolution.
    """
    if scale.numel() == 1:
        return quantize_and_dequantize(weight, scale.reshape(()), offset.reshape(()))
    if kind is WeightKind.RNN and scale.numel() < weight.shape[0]:
        rows = weight.shape[0] // scale.numel()
        scale, offset = scale.repeat_interleave(rows), offset.repeat_interleave(rows)
    if kind is not WeightKind.CONV_TRANSPOSE:
        return quantize_and_dequantize(weight, scale, offset, axis=0)
    if groups == 1:
        return quantize_and_dequantize(weight, scale, offset, axis=1)
    # The output channels of a transposed convolution with groups lie on two axes.
    rounded = quantize_and_dequantize(channels_first(weight, kind, groups), scale, offset, axis=0)
    return from_channels_first(rounded, weight.shape, kind, groups)
