"""The fake-quant file: quantization simulated with standard operators, for onnxruntime on any machine.

``x → Mul(1/scale_d) → Round → Add(offset) → Clip → Sub(offset) → layer → Mul(scale_w · scale_d)``; weights and bias of
the layer are floats with integer values, so the layer computes the same as the chip. LSTM and GRU have no integer form
in ONNX: their weights are dequantized in place; x and the initial hidden state are quantized and dequantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper

from amct.export.formats import ExportedModel, write_metadata
from amct.export.onnx.layer import layer_report, replace_bias, replace_weight, share_weights, straighten_gemm
from amct.export.onnx.layer_lookup import find_layers
from amct.export.qdq.balance import along_channels, insert_balance
from amct.numerics.affine import integer_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnx import ModelProto

    from amct.export.binding import LayerBinding
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.kept_weights import KeptWeights
    from amct.export.onnx.layer import Layer
    from amct.numerics.qparams import LayerQParams, QParams


def fake_quant_model(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    factors: Mapping[str, LayerQParams],
    *,
    kept: KeptWeights | None = None,
) -> ExportedModel:
    """Convert a float ONNX model to its fake-quant form.

    Args:
        model: float model, BatchNorm folded; it is not changed.
        bindings: the node of each layer.
        factors: by layer name; a bound layer without factors stays float.
        kept: takes the large weights of the result, which then refers to them; None: they are in its message.

    Raises:
        ExportError: a node does not match its binding, or a bias does not fit int32.
    """
    graph, layers, skipped = find_layers(model, bindings, factors, kept)
    quantizers: dict[tuple[str, QParams], str] = {}
    reports = []
    outputs: dict[str, str] = {}
    for layer in layers:
        before, output = len(graph.nodes), layer.output
        if layer.kind.is_recurrent:
            _recurrent(graph, layer)
        else:
            outputs[layer.name] = _quantize_layer(graph, layer, quantizers)
        reports.append(layer_report(layer, [node.name for node in graph.nodes[before:]], output))
    share_weights(graph, layers)
    exported = graph.build()
    write_metadata(exported, outputs=outputs)
    return ExportedModel(model=exported, layers=tuple(reports), skipped=tuple(skipped), kept=kept)


def _quantize_layer(graph: OnnxGraph, layer: Layer, quantizers: dict[tuple[str, QParams], str]) -> str:
    """Make a layer compute with integer values; returns the tensor of its dequantized output."""
    tensor = layer.reader.input[0]
    if not layer.is_wide_float:
        tensor = graph.add_node("Cast", f"{layer.name}.quant.fakequant.cast", [tensor], to=TensorProto.FLOAT)
    tensor = insert_balance(graph, layer, tensor)
    key = (tensor, layer.qparams.input)
    if key not in quantizers:
        quantizers[key] = insert_quantizer(graph, f"{layer.name}.quant", tensor, layer.qparams.input)
    graph.set_input(layer.reader, 0, quantizers[key])
    if layer.weight is not None:
        straighten_gemm(graph, layer)
        replace_weight(graph, layer, layer.integer_weight(), dtype=np.float32)
        if layer.adds_integers:
            replace_bias(graph, layer, layer.integer_bias().astype(np.float32))
    return _insert_dequantizer(graph, layer)


def insert_quantizer(graph: OnnxGraph, name: str, tensor: str, qparams: QParams) -> str:
    """Insert ``<name>.fakequant.*`` nodes; their result is the integers of a tensor minus the offset, as floats."""
    prefix = f"{name}.fakequant"
    lowest, highest = integer_range(qparams.bits)

    def scalar(suffix: str, value: float) -> str:
        return graph.add_constant(f"{prefix}.{suffix}", np.asarray(value, dtype=np.float32))

    step, shift = scalar("scale", float(np.float32(1) / np.float32(qparams.step))), scalar("offset", qparams.zero_point)
    low, high = scalar("min_val", lowest), scalar("max_val", highest)
    scaled = graph.add_node("Mul", f"{prefix}.mul", [tensor, step])
    rounded = graph.add_node("Round", f"{prefix}.round", [scaled])
    shifted = graph.add_node("Add", f"{prefix}.add", [rounded, shift])
    clipped = graph.add_node("Clip", f"{prefix}.clip", [shifted, low, high])
    return graph.add_node("Sub", f"{prefix}.sub", [clipped, shift])


def _insert_dequantizer(graph: OnnxGraph, layer: Layer) -> str:
    scales = along_channels(layer, layer.dequant_scale())
    if graph.rank(layer.output) == 1:  # one vector: two dimensions would make it a matrix
        scales = scales.reshape(-1)
    scale = graph.add_constant(f"{layer.name}.fakedequant.dqscale", scales)
    name = f"{layer.name}.fakedequant.mul"
    last = name if layer.is_wide_float else f"{layer.name}.fakedequant.cast"
    read, write = graph.tap(layer.output, f"{last}.output0")
    if layer.is_wide_float:
        return graph.add_node("Mul", name, [read, scale], [write])
    for tensor in (layer.node.output[0], read):
        graph.forget_type(tensor)
    wide = graph.add_node("Mul", name, [read, scale])
    return graph.add_node("Cast", last, [wide], [write], to=layer.element_type)


def _recurrent(graph: OnnxGraph, layer: Layer) -> None:
    qparams, node = layer.qparams, layer.node
    dtype = helper.tensor_dtype_to_np_dtype(layer.element_type)
    graph.set_input(node, 0, _quantize_dequantize(graph, layer, "", node.input[0], qparams.input))
    if len(node.input) > 5 and node.input[5]:
        assert qparams.hidden is not None
        state = _quantize_dequantize(graph, layer, "1", node.input[5], qparams.hidden)
        graph.set_input(node, 5, state)
    weight = layer.integer_weight() * layer.row_scales().reshape(-1, 1)
    recurrent = layer.integer_recurrent_weight() * layer.recurrent_row_scales().reshape(-1, 1)
    replace_weight(graph, layer, weight[np.newaxis].astype(dtype))
    replace_weight(graph, layer, recurrent[np.newaxis].astype(dtype), index=2)
    if layer.bias is not None:
        bias = layer.integer_bias().astype(np.float64) * layer.dequant_scale()
        replace_weight(graph, layer, bias[np.newaxis].astype(dtype), index=3)


def _quantize_dequantize(graph: OnnxGraph, layer: Layer, number: str, tensor: str, qparams: QParams) -> str:
    """Quantize and dequantize x (number "") or the hidden state (number "1") of a recurrent layer."""
    name = f"{layer.name}.quant{number}"
    if not layer.is_wide_float:
        tensor = graph.add_node("Cast", f"{name}.fakequant.cast", [tensor], to=TensorProto.FLOAT)
    if not number:
        tensor = insert_balance(graph, layer, tensor)
    integers = insert_quantizer(graph, name, tensor, qparams)
    prefix = f"{layer.name}.anti_quant{number}.fake_antiquant"
    step = graph.add_constant(f"{prefix}.scale", np.asarray(qparams.step, dtype=np.float32))
    result = graph.add_node("Mul", f"{prefix}.mul", [integers, step])
    if layer.is_wide_float:
        return result
    return graph.add_node("Cast", f"{prefix}.cast", [result], to=layer.element_type)
