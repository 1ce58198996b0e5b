"""Writes QuantizeLinear and DequantizeLinear nodes with the integer types of a target.

==========  ===============  ===========================================================================================
target      weights          for
==========  ===============  ===========================================================================================
portable    int8, 8 bits,    every CPU: without VNNI, onnxruntime adds pairs of uint8 · int8 products in 16 bits, so the
            pairs bounded    float weights are rounded with a bound on such pairs (``rounding.py``); at worst, two
                             of the largest weights in one pair, that is 7 bits. Depthwise convolutions add no pairs,
                             ready integers that fit are kept
vnni        int8, 8 bits     CPUs with VNNI (and ARM): the record's own integers; where it has one scale for all outputs
                             of a linear layer, placement fast rounds the float weights with a scale per output
exact8      uint8, 8 bits    every CPU, slower: the record's own integers + 128, zero point 128
==========  ===============  ===========================================================================================

Weights of 4 bits are stored as int4, two in a byte, and cast to int8 (opset 21); for exact8, and in models that have no
form in opset 21, they are stored as other weights.

Activations are uint8: the record's integer + 128, with the zero point shifted by 128, which is lossless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from onnx import TensorProto

from amct.errors import CalibrationError, ExportError
from amct.export.onnx.layer import owned_name, replace_bias, stored_weight
from amct.export.onnx.rewrites import can_be_raised
from amct.export.qdq.rewrites import insert_balance
from amct.export.request import Target
from amct.model.kinds import LayerKind
from amct.numerics.affine import fine_where_empty, fit_bias
from amct.numerics.rounding import adds_pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer
    from amct.numerics.qparams import QParams

BITS_OF_ANY_PAIR = 7
"""Two products of weights with so many bits always fit 16 bits."""
SIXTEEN_BIT_OPSET = 21


class QdqNodes:
    """Writes quantizers into one graph; equal quantizers of one tensor are written once."""

    def __init__(self, graph: OnnxGraph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.fast = False
        """Placement fast: the file may deviate from the record where that is closer to the float model."""
        self.notes: list[str] = []
        self.four_bits = target is not Target.EXACT8 and can_be_raised(graph.nodes, graph.opset, SIXTEEN_BIT_OPSET)
        """Whether weights of 4 bits are stored as such, which needs opset 21."""
        self.has_four_bits = False
        self._bits: dict[str, int] = {}
        self._pairs: dict[tuple[str, QParams], tuple[str, str]] = {}
        self._balanced: dict[tuple[str, bytes], str] = {}

    def activation(self, tensor: str, qparams: QParams, name: str | None = None) -> tuple[str, str]:
        """Quantize and dequantize a tensor; returns the integer and the float tensor.

        Nodes are named ``<name>.quantize`` and ``<name>.dequantize``; ``name`` is by default the tensor's name.
        """
        key = (tensor, qparams)
        if key not in self._pairs:
            base = self.graph.fresh_name(f"{name or tensor}.quantize").removesuffix(".quantize")
            source = self._clipped(tensor, qparams, base) if qparams.bits == 4 else tensor
            parameters = self._parameters(base, qparams)
            integers = self.graph.add_node("QuantizeLinear", f"{base}.quantize", [source, *parameters])
            result = self.graph.add_node("DequantizeLinear", f"{base}.dequantize", [integers, *parameters])
            self._pairs[key] = (integers, result)
        return self._pairs[key]

    def behind(self, tensor: str, qparams: QParams) -> str:
        """As ``activation``, but every reader of the tensor, and the graph output, reads the result.

        Returns the integer tensor.
        """
        graph = self.graph
        base = graph.fresh_name(f"{tensor}.quantize").removesuffix(".quantize")
        read, write = graph.tap(tensor, f"{base}.dequantize.output0")
        parameters = self._parameters(base, qparams)
        integers = graph.add_node("QuantizeLinear", f"{base}.quantize", [read, *parameters])
        graph.add_node("DequantizeLinear", f"{base}.dequantize", [integers, *parameters], [write])
        self._pairs[write, qparams] = (integers, write)
        return integers

    def balanced(self, layer: OnnxLayer, tensor: str) -> str:
        """Divide a layer's input by its balance factors; layers with the same factors share the result."""
        assert layer.qparams.balance is not None
        key = (tensor, layer.qparams.balance.numpy().tobytes())
        if key not in self._balanced:
            self._balanced[key] = insert_balance(self.graph, layer, tensor)
        return self._balanced[key]

    def zero(self, qparams: QParams) -> NDArray[np.unsignedinteger]:
        """The integer that represents 0.0."""
        dtype, shift = (np.uint16, 2**15) if qparams.bits == 16 else (np.uint8, 2**7)
        return np.asarray(qparams.zero_point + shift, dtype=dtype)

    def constant(self, node: NodeProto, index: int) -> None:
        """Quantize a constant operand of a node to uint8."""
        name = node.input[index]
        value = self.graph.constant(name)
        assert value is not None  # checked by the placement
        low, high = min(0.0, float(value.min())), max(0.0, float(value.max()))
        scale = np.float32((high - low) / 255 or 1.0)
        zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
        integers = np.clip(np.rint(value / scale) + zero, 0, 255).astype(np.uint8)
        base = self.graph.fresh_name(f"{node.name}.operand{index}")
        result = self._dequantized_constant(base, integers, np.asarray(scale), np.asarray(zero))
        self.graph.set_input(node, index, result)

    def padded(self, pad: NodeProto, source: str, qparams: QParams) -> str:
        """Make a Pad work on ``source``, the integers of its input; its readers read the dequantized result."""
        graph = self.graph
        base = graph.fresh_name(pad.output[0])
        read, write = graph.tap(pad.output[0], f"{base}.dequantize.output0")
        graph.forget_type(read)
        parameters = self._parameters(base, qparams)
        graph.set_input(pad, 0, source)
        graph.set_input(pad, 2, parameters[1])
        graph.add_node("DequantizeLinear", f"{base}.dequantize", [read, *parameters], [write])
        return read

    def weight_bits(self, layer: OnnxLayer) -> int:
        """The bit width of a layer's weights in the file, once they are written."""
        return self._bits.get(layer.name, layer.qparams.weight.bits)

    def weights(self, layer: OnnxLayer, scale_d: float) -> None:
        """Make a layer read its weights and bias from integers.

        ``scale_d`` is the scale of its input in this file.
        """
        if layer.weight is None:
            return
        if layer.kind.is_recurrent:
            own, recurrent = layer.integer_weight()[np.newaxis], layer.integer_recurrent_weight()[np.newaxis]
            self._weight(layer, 1, own, layer.row_scales(), axis=1)
            self._weight(layer, 2, recurrent, layer.recurrent_row_scales(), axis=1)
            return
        again = self._is_rounded_again(layer)
        integers, scales = self._layer_weight(layer, again=again)
        if not again:
            layer = layer.with_own_bias(integers)
        elif layer.bias is not None:  # its own integers have errors of their own
            layer = layer.with_corrected_bias(integers, scales)
            integers, scales = _suited_to_bias(layer, integers, scales, scale_d)
        if layer.kind is LayerKind.CONV_TRANSPOSE and layer.groups > 1 and scales.size > 1:
            self._grouped_transposed(layer, integers, scales)
        else:
            columns = layer.kind is LayerKind.LINEAR and not layer.transposed_gemm
            axis = 1 if columns or layer.kind is LayerKind.CONV_TRANSPOSE else 0
            self._weight(layer, 1, stored_weight(layer, integers), scales, axis)
        if layer.bias is not None:
            self._bias(layer, scales, scale_d)

    def _is_rounded_again(self, layer: OnnxLayer) -> bool:
        """Whether the float weights are rounded again; otherwise the file has the record's own integers."""
        if layer.kind not in (LayerKind.CONV, LayerKind.LINEAR) or layer.qparams.input.bits > 8:
            return False
        if self.target is Target.PORTABLE and layer.qparams.weight.bits > BITS_OF_ANY_PAIR:
            return True
        one_scale = layer.qparams.weight.scale.numel() == 1
        return self.fast and self.target is Target.VNNI and layer.kind is LayerKind.LINEAR and one_scale

    def _layer_weight(self, layer: OnnxLayer, *, again: bool) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        if not again:
            return layer.integer_weight(), layer.row_scales()
        bounded = self.target is Target.PORTABLE and _adds_pairs(layer)
        integers, scales = layer.requantized_weight(layer.qparams.weight.bits, bounded_pairs=bounded)
        if bounded and max(int(integers.max()), -int(integers.min())) < 2 ** (BITS_OF_ANY_PAIR - 1):
            self._bits[layer.name] = BITS_OF_ANY_PAIR
        return integers, scales

    def _weight(
        self, layer: OnnxLayer, index: int, integers: NDArray[np.int8], scales: NDArray[np.float32], axis: int
    ) -> None:
        base = owned_name(self.graph, layer.node, index, f"{layer.name}.weight{index}")
        result = self._dequantized_weight(base, integers, scales, axis, layer.qparams.weight.bits)
        if layer.kind.is_recurrent and not layer.is_wide_float:
            result = self.graph.add_node("Cast", f"{base}.cast", [result], to=layer.element_type)
        self.graph.set_input(layer.node, index, result)

    def _dequantized_weight(
        self, base: str, integers: NDArray[np.int8], scales: NDArray[np.float32], axis: int, bits: int
    ) -> str:
        if bits == 4 and self.four_bits and integers.min() >= -8 and integers.max() <= 7:
            return self._dequantized_four_bits(base, integers, scales, axis)
        stored: NDArray[np.integer] = integers
        zero: NDArray[np.integer] = np.zeros(scales.size, dtype=np.int8)
        if self.target is Target.EXACT8:
            stored, zero = (integers.astype(np.int16) + 128).astype(np.uint8), np.full(scales.size, 128, np.uint8)
        return self._dequantized_constant(base, stored, scales, zero, axis)

    def _dequantized_four_bits(
        self, base: str, integers: NDArray[np.int8], scales: NDArray[np.float32], axis: int
    ) -> str:
        """Store two integers a byte, and cast them to int8 ahead of DequantizeLinear.

        When onnxruntime loads the file it computes the cast, and has an integer kernel for what is left; for int4
        ahead of DequantizeLinear it has none.
        """
        self.has_four_bits = True
        graph = self.graph
        packed = graph.add_initializer(f"{base}.quantized", integers.astype(ml_dtypes.int4))
        stored = graph.add_node("Cast", graph.fresh_name(f"{base}.cast"), [packed], to=TensorProto.INT8)
        zero = np.zeros(scales.size, dtype=np.int8)
        return self._dequantized_constant(base, stored, scales, zero, axis)

    def _dequantized_constant(
        self,
        base: str,
        integers: NDArray[np.integer] | str,
        scales: NDArray[np.float32],
        zero: NDArray[np.integer] | None = None,
        axis: int = 0,
    ) -> str:
        """Store integers with their parameters (one, or one per index of an axis) and a node that dequantizes them.

        The integers may be a tensor that there is already.
        """
        graph, per_tensor = self.graph, scales.size == 1
        stored = integers if isinstance(integers, str) else graph.add_initializer(f"{base}.quantized", integers)
        arrays: dict[str, NDArray[Any]] = {"scale": scales.reshape(()) if per_tensor else scales}
        if zero is not None:
            arrays["zero_point"] = zero.reshape(()) if per_tensor else zero
        inputs = [stored, *(graph.add_initializer(f"{base}.{name}", array) for name, array in arrays.items())]
        attributes: dict[str, Any] = {} if per_tensor else {"axis": axis}
        return graph.add_node("DequantizeLinear", graph.fresh_name(f"{base}.dequantize"), inputs, **attributes)

    def _grouped_transposed(self, layer: OnnxLayer, integers: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        """Store the weight ``[Cin, Cout/g, …]`` of a grouped ConvTranspose, whose scales run along two of its axes.

        It is stored as ``[Cout, Cin/g, …]`` and rearranged to its own layout after dequantization.
        """
        graph, groups, name = self.graph, layer.groups, f"{layer.name}.weight"
        inputs, outputs, *kernel = integers.shape
        rows = integers.reshape(groups, inputs // groups, outputs, *kernel).swapaxes(1, 2)
        base = owned_name(graph, layer.node, 1, name)
        flat = rows.reshape(groups * outputs, inputs // groups, *kernel)
        tensor = self._dequantized_weight(base, np.ascontiguousarray(flat), scales, 0, layer.qparams.weight.bits)
        wide = graph.add_initializer(f"{name}.by_group", np.array([groups, outputs, inputs // groups, *kernel]))
        tensor = graph.add_node("Reshape", f"{name}.split", [tensor, wide])
        permutation = [0, 2, 1, *range(3, 3 + len(kernel))]
        tensor = graph.add_node("Transpose", f"{name}.swap", [tensor], perm=permutation)
        own = graph.add_initializer(f"{name}.own_shape", np.array(integers.shape))
        graph.set_input(layer.node, 1, graph.add_node("Reshape", f"{name}.join", [tensor, own]))

    def _bias(self, layer: OnnxLayer, scales: NDArray[np.float32], scale_d: float) -> None:
        """Store the bias as int32 with scale scale_d · scale_w, which onnxruntime's integer kernel requires."""
        try:
            integers = layer.integer_bias(scales, scale_d)
        except ExportError as error:
            self.notes.append(f"{error}; here its bias stays float, so onnxruntime computes the layer in float")
            if not layer.is_wide_float:
                assert layer.bias is not None  # checked by the caller
                replace_bias(self.graph, layer, layer.bias.astype(np.float32))
            return
        base = owned_name(self.graph, *layer.bias_place, f"{layer.name}.bias")
        result = self._dequantized_constant(base, integers, scales * np.float32(scale_d))
        self.graph.set_input(*layer.bias_place, result)

    def _parameters(self, base: str, qparams: QParams) -> list[str]:
        scale = self.graph.add_initializer(f"{base}.scale", np.asarray(qparams.step, dtype=np.float32))
        return [scale, self.graph.add_initializer(f"{base}.zero_point", self.zero(qparams))]

    def _clipped(self, tensor: str, qparams: QParams, base: str) -> str:
        """Clip 4-bit activations to their own range, because uint8, which stores them, saturates later."""
        low = np.float32((-8 - qparams.zero_point) * qparams.step)
        high = np.float32((7 - qparams.zero_point) * qparams.step)
        limits = [
            self.graph.add_initializer(f"{base}.minimum", np.asarray(low)),
            self.graph.add_initializer(f"{base}.maximum", np.asarray(high)),
        ]
        return self.graph.add_node("Clip", f"{base}.clip", [tensor, *limits])


def _adds_pairs(layer: OnnxLayer) -> bool:
    assert layer.weight is not None
    return adds_pairs(layer.weight.shape, layer.groups)


def _suited_to_bias(
    layer: OnnxLayer, integers: NDArray[np.int8], scales: NDArray[np.float32], scale_d: float
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights whose scales suit the bias: fine for channels without weights, large enough for int32."""
    assert layer.bias is not None
    assert layer.weight is not None
    bias, data = torch.tensor(np.asarray(layer.bias, dtype=np.float32)), torch.tensor(scale_d, dtype=torch.float32)
    empty = torch.from_numpy(~integers.reshape(len(integers), -1).any(1))
    fine = fine_where_empty(torch.from_numpy(np.array(scales)), empty, bias, data)
    try:
        fit = fit_bias(bias, fine, data)
    except CalibrationError:  # no scale is large enough: the bias stays float
        return integers, scales
    if fit.raised:
        rows, integers = list(fit.raised), integers.copy()
        steps = fit.scale_weight[rows].numpy().reshape(-1, *[1] * (integers.ndim - 1))
        integers[rows] = np.rint(np.asarray(layer.weight)[rows] / steps).astype(np.int8)
    return integers, fit.scale_weight.numpy()
