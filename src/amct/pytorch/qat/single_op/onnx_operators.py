"""ONNX operators that a module can call while ``torch.onnx.export`` runs it, QuantizeLinear and DequantizeLinear too.

Torch has them since 2.8, in ``torch.onnx.ops``. For older releases they are made here, with the same arguments, as one
operator of the captured program whose translation is the ONNX node.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.settings import WeightKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_IN_TORCH = hasattr(torch.onnx, "ops")
_EXPORTER = "torch.onnx._internal.exporter"


def is_exporting() -> bool:
    """Whether ``torch.onnx.export`` is running this module, by its exporter that captures programs."""
    if not torch.compiler.is_compiling():
        return False
    if _IN_TORCH:
        return torch.onnx.is_in_onnx_export()
    return not torch.compiler.is_dynamo_compiling() and _called_by_exporter()


def symbolic(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    shape: Sequence[int | torch.SymInt],
    version: int | None = None,
) -> Tensor:
    """A node with one result: ``name`` is the operator, ``domain::operator`` if it is not of ONNX itself."""
    return symbolic_multi_out(name, inputs, attributes, dtypes=[dtype], shapes=[shape], version=version)[0]


def symbolic_multi_out(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int],
    *,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int | torch.SymInt]],
    version: int | None = None,
) -> Sequence[Tensor]:
    """A node with several results; ``dtypes`` and ``shapes`` are theirs."""
    if _IN_TORCH:
        return torch.onnx.ops.symbolic_multi_out(
            name, inputs, dict(attributes), dtypes=dtypes, shapes=shapes, version=version
        )
    sizes = [size for shape in shapes for size in shape]
    ranks = [len(shape) for shape in shapes]
    types = [str(dtype).removeprefix("torch.") for dtype in dtypes]  # lists of types do not arrive as such
    results: Sequence[Tensor] = torch.ops.amct.onnx_node(
        name, inputs, list(attributes), list(attributes.values()), types, sizes, ranks, version
    )
    return results


# -- releases before 2.8 -----------------------------------------------------------------------------------------------


def _called_by_exporter() -> bool:
    """Older releases do not say that they export to ONNX: it is seen from the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_EXPORTER):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _results(  # noqa: PLR0913  the arguments of the operator
    name: str,
    inputs: Sequence[Tensor | None],
    keys: Sequence[str],
    values: Sequence[int],
    dtypes: Sequence[str],
    sizes: Sequence[int | torch.SymInt],
    ranks: Sequence[int],
    version: int | None,
) -> list[Tensor]:
    """Tensors like the results, without values."""
    del name, keys, values, version
    device = next(each.device for each in inputs if each is not None)
    rest = iter(sizes)
    shapes = [[next(rest) for _ in range(rank)] for rank in ranks]
    types = [getattr(torch, dtype) for dtype in dtypes]
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types, strict=True)]


def _node(  # noqa: PLR0913  the arguments of the operator
    name: str,
    inputs: Sequence[Any],
    keys: Sequence[str],
    values: Sequence[int],
    dtypes: Sequence[str],
    sizes: Sequence[Any],
    ranks: Sequence[int],
    version: int | None = None,
) -> Sequence[Any]:
    """The ONNX node, added to the graph that the exporter is building."""
    from onnxscript import evaluator, ir

    del sizes, ranks
    domain, _, operator = name.rpartition("::")
    attributes = [ir.AttrInt64(key, value) for key, value in zip(keys, values, strict=True)]
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    node = ir.Node(domain, operator, given, attributes, num_outputs=len(dtypes), version=version)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return node.outputs


def _register() -> None:
    """Make the operator and its translation known to torch; ``torch.onnx.export`` reads its table when it begins."""
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl

    torch.library.define(
        "amct::onnx_node",
        "(str name, Tensor?[] inputs, str[] keys, int[] values, str[] dtypes, SymInt[] sizes, int[] ranks,"
        " int? version) -> Tensor[]",
    )
    torch.library.register_fake("amct::onnx_node", _results)
    onnx_impl(torch.ops.amct.onnx_node.default, no_compile=True)(_node)


if not _IN_TORCH:
    _register()


# -- QuantizeLinear and DequantizeLinear -------------------------------------------------------------------------------


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


def exported_weight(weight: Tensor, scale: Tensor, offset: Tensor, kind: WeightKind, groups: int) -> Tensor:
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
