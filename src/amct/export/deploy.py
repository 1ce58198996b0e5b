"""The deploy file, with integer weights and Ascend's own operators, for ATC, and the fake-quant file that simulates it.

``x → AscendQuant → layer (int8 weight, int32 bias) → AscendDequant``. The operators are in ONNX's default domain, as
AMCT writes them, so neither onnxruntime nor ONNX's checker accepts the file.

========================  ==============================================================================================
``<L>.quant``             AscendQuant: ``scale`` = 1/scale_d, ``offset``, ``dst_type``; one for all layers that read the
                          same tensor with the same parameters
``<L>.dequant``           AscendDequant: input 1 is ``<L>.dequant.param``, uint64, one or Cout values; the low 32
                          bits are the float32 scale_w · scale_d; ``dtype`` 0: float32, 1: float16
INT4 weights              two values per byte along Cin, the even one in the low half
LSTM, GRU                 BasicLSTMInplaceFillWindowCache, BasicGRUInplaceFillWindowCache
========================  ==============================================================================================

The fake-quant file simulates it with standard operators, for onnxruntime on any machine: ``x → Mul(1/scale_d) → Round →
Add(offset) → Clip → Sub(offset) → layer → Mul(scale_w · scale_d)``; weights and bias of the layer are floats with
integer values, so the layer computes the same as the chip. LSTM and GRU have no integer form in ONNX: their weights are
dequantized in place; x and the initial hidden state are quantized and dequantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from onnx import TensorProto, helper

from amct.errors import ExportError
from amct.export.formats import ExportedModel, write_metadata
from amct.export.onnx.layer import (
    layer_report,
    owned_name,
    replace_bias,
    replace_weight,
    share_weights,
    stored_weight,
    straighten_gemm,
)
from amct.export.onnx.layer_lookup import find_layers, recurrent_problem
from amct.export.onnx.messages import attribute_value
from amct.export.qdq.rewrites import along_channels, insert_balance
from amct.model.kinds import LayerKind
from amct.numerics.affine import integer_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.kept_weights import KeptWeights
    from amct.export.onnx.layer import OnnxLayer
    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.numerics.qparams import LayerQParams, QParams

_Quantizers: TypeAlias = "dict[tuple[str, QParams], str]"
"""The integers of a tensor by its name and its parameters: layers that read the same ones share them."""
_RECURRENT_OPERATOR = {
    LayerKind.LSTM: "BasicLSTMInplaceFillWindowCache",
    LayerKind.GRU: "BasicGRUInplaceFillWindowCache",
}
_QUANT_DTYPE = {8: 2, 16: 6}
_CHANNEL_IN_AXIS = {LayerKind.CONV: 1, LayerKind.CONV_TRANSPOSE: 0, LayerKind.LINEAR: 0}


def ascend_model(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    qparams: Mapping[str, LayerQParams],
    *,
    kept: KeptWeights | None = None,
) -> ExportedModel:
    """Convert a float ONNX model to its deploy form; the arguments are those of ``fake_quant_model``.

    Raises:
        ExportError: a node does not match its binding, a bias does not fit int32, an INT4 weight cannot be packed, or a
            recurrent layer has a form that Ascend's operators lack.
    """
    return _converted(model, bindings, qparams, kept, _quantize_layer)


def _converted(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    qparams: Mapping[str, LayerQParams],
    kept: KeptWeights | None,
    convert: Callable[[OnnxGraph, OnnxLayer, _Quantizers], None],
) -> ExportedModel:
    """The model after every bound layer that has parameters was converted."""
    graph, layers, skipped = find_layers(model, bindings, qparams, kept)
    quantizers: _Quantizers = {}
    reports = []
    for layer in layers:
        before, output = len(graph.nodes), layer.output
        convert(graph, layer, quantizers)
        reports.append(layer_report(layer, [node.name for node in graph.nodes[before:]], output))
    share_weights(graph, layers)
    return ExportedModel(model=graph.build(), layers=tuple(reports), skipped=tuple(skipped), kept=kept)


def _quantize_layer(graph: OnnxGraph, layer: OnnxLayer, quantizers: _Quantizers) -> None:
    if layer.kind.is_recurrent:
        _replace_recurrent(graph, layer)
        return
    straighten_gemm(graph, layer)
    _insert_quant(graph, layer, quantizers)
    if layer.weight is not None:
        integers = layer.integer_weight()
        name = replace_weight(graph, layer, integers)
        if layer.qparams.weight.bits == 4:
            graph.set_initializer(name, _packed(layer, integers))
        layer = layer.with_own_bias(integers)
        if layer.adds_integers:
            _replace_bias(graph, layer)
        else:
            _replace_float_bias(graph, layer)
    _insert_dequant(graph, layer)


def _insert_quant(graph: OnnxGraph, layer: OnnxLayer, quantizers: _Quantizers) -> None:
    qparams = layer.qparams.input
    tensor = insert_balance(graph, layer, layer.reader.input[0], _numpy_float(layer))
    key = (tensor, qparams)
    if key not in quantizers:
        quantizers[key] = graph.add_node(
            "AscendQuant",
            f"{layer.name}.quant",
            [tensor],
            scale=_reciprocal(qparams.step),
            offset=float(qparams.zero_point),
            dst_type=f"INT{qparams.bits}",
        )
    graph.set_input(layer.reader, 0, quantizers[key])
    if layer.pad is not None:
        # The Pad reads integers, where zero is the offset.
        zero = np.asarray(qparams.zero_point, dtype=np.int16 if qparams.bits == 16 else np.int8)
        graph.set_input(layer.pad, 2, graph.add_initializer(f"{layer.pad.name}.value", zero))
        graph.forget_type(layer.pad.output[0])


def _insert_dequant(graph: OnnxGraph, layer: OnnxLayer) -> None:
    name = f"{layer.name}.dequant"
    param = graph.add_initializer(f"{name}.param", dequant_param(layer.dequant_scale()))
    read, write = graph.tap(layer.output, f"{name}.output0")
    for tensor in (layer.node.output[0], read):
        graph.forget_type(tensor)
    graph.add_node("AscendDequant", name, [read, param], [write], dtype=_dequant_dtype(layer))


def _replace_bias(graph: OnnxGraph, layer: OnnxLayer) -> None:
    name = replace_bias(graph, layer, layer.integer_bias())
    if layer.qparams.input.bits != 4:
        return
    # Ascend's 4-bit kernels add the bias in float.
    as_float = graph.add_node("Cast", f"{layer.name}.bias_quant", [name], to=TensorProto.FLOAT)
    graph.set_input(*layer.bias_place, as_float)


def _replace_float_bias(graph: OnnxGraph, layer: OnnxLayer) -> None:
    """Store the corrected bias of a layer that adds it in float, behind the dequantization."""
    if layer.bias is not None and layer.qparams.corrects_bias and layer.qparams.mean is not None:
        replace_bias(graph, layer, layer.bias.astype(_numpy_float(layer)))


def dequant_param(scale: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Ascend's dequantization parameter: float32 bits in the low 32 bits; the weight offset byte above them is 0."""
    return np.ascontiguousarray(scale, dtype=np.float32).view(np.uint32).astype(np.uint64)


def pack_int4(weight: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Pack two 4-bit values per byte along ``axis``, which is halved; even indices are in the low half.

    Raises:
        ExportError: the axis has an odd length.
    """
    if weight.shape[axis] % 2:
        raise ExportError(f"INT4 packs pairs of input channels, got {weight.shape[axis]}; use 8-bit weights here")
    ahead = np.moveaxis(weight, axis, 0)
    packed = ((ahead[1::2].astype(np.uint8) << 4) | (ahead[::2].astype(np.uint8) & 0x0F)).view(np.int8)
    return np.ascontiguousarray(np.moveaxis(packed, 0, axis))


def _packed(layer: OnnxLayer, integers: NDArray[np.int8]) -> NDArray[np.int8]:
    if layer.groups > 1:
        raise ExportError(
            f'layer "{layer.name}": INT4 weights of a convolution with {layer.groups} groups cannot be packed; '
            "use 8-bit weights here"
        )
    try:
        return pack_int4(stored_weight(layer, integers), _CHANNEL_IN_AXIS[layer.kind])
    except ExportError as error:
        raise ExportError(f'layer "{layer.name}": {error}') from error


# -- recurrent layers -------------------------------------------------------------------------------------------------


def _replace_recurrent(graph: OnnxGraph, layer: OnnxLayer) -> None:
    _check_recurrent(layer)
    node, data, hidden = layer.node, layer.qparams.input, layer.qparams.hidden
    x = insert_balance(graph, layer, node.input[0], _numpy_float(layer))
    inputs = [*node.input, *[""] * (8 - len(node.input))]
    _, _, _, bias, lengths, state, cell, _ = inputs
    weight = owned_name(graph, node, 1, f"{layer.name}.weight")
    recurrent = owned_name(graph, node, 2, f"{layer.name}.recurrent_weight")
    graph.set_initializer(weight, layer.integer_weight()[np.newaxis])
    graph.set_initializer(recurrent, layer.integer_recurrent_weight()[np.newaxis])
    if layer.bias is not None:
        bias = owned_name(graph, node, 3, f"{layer.name}.bias")
        graph.set_initializer(bias, layer.integer_bias()[np.newaxis])
    param = graph.add_initializer(f"{layer.name}.dequant.param", dequant_param(layer.dequant_scale()))
    states = [state, cell] if layer.kind is LayerKind.LSTM else [state]
    graph.set_inputs(node, [x, weight, recurrent, *states, bias, lengths, "", param])
    node.op_type = _RECURRENT_OPERATOR[layer.kind]
    assert hidden is not None
    settings: dict[str, object] = {
        "activations": [],
        "activation_alpha": [],
        "activation_beta": [],
        "clip": float(attribute_value(node, "clip", -1.0)),
        "direction": "forward",
        "quant_sqrt_mode_x": 0,
        "quant_sqrt_mode_h": 0,
        "quant_scale_x": _reciprocal(data.step),
        "quant_offset_x": float(data.zero_point),
        "quant_scale_h": _reciprocal(hidden.step),
        "quant_offset_h": float(hidden.zero_point),
        "quant_dtype": _QUANT_DTYPE[data.bits],
    }
    if layer.kind is LayerKind.LSTM:
        settings["input_forget"] = int(attribute_value(node, "input_forget", 0))
    for name, value in settings.items():
        graph.set_attribute(node, name, value)
    graph.drop_attribute(node, "layout")


def _check_recurrent(layer: OnnxLayer) -> None:
    four_bits = "its activation has 4 bits; Ascend has 8 and 16"
    problem = recurrent_problem(layer.node) if layer.qparams.input.bits in _QUANT_DTYPE else four_bits
    if problem is not None:
        raise ExportError(
            f'layer "{layer.name}": Ascend\'s {_RECURRENT_OPERATOR[layer.kind]} cannot compute it: {problem}; '
            "leave this layer in float (skip_layers)"
        )


def _reciprocal(scale: float) -> float:
    return float(np.float32(1) / np.float32(scale))


def _numpy_float(layer: OnnxLayer) -> type[np.floating]:
    return np.float16 if layer.element_type == TensorProto.FLOAT16 else np.float32


def _dequant_dtype(layer: OnnxLayer) -> int:
    return 1 if layer.element_type == TensorProto.FLOAT16 else 0


# -- the fake-quant file -----------------------------------------------------------------------------------------------


def fake_quant_model(
    model: ModelProto,
    bindings: Sequence[LayerBinding],
    qparams: Mapping[str, LayerQParams],
    *,
    kept: KeptWeights | None = None,
) -> ExportedModel:
    """Convert a float ONNX model to its fake-quant form.

    Args:
        model: float model, BatchNorm folded; it is not changed.
        bindings: the node of each layer.
        qparams: by layer name; a bound layer without parameters stays float.
        kept: takes the large weights of the result, which then refers to them; None: they are in its message.

    Raises:
        ExportError: a node does not match its binding, or a bias does not fit int32.
    """
    outputs: dict[str, str] = {}

    def simulate(graph: OnnxGraph, layer: OnnxLayer, quantizers: _Quantizers) -> None:
        if layer.kind.is_recurrent:
            _recurrent(graph, layer)
        else:
            outputs[layer.name] = _simulate_layer(graph, layer, quantizers)

    exported = _converted(model, bindings, qparams, kept, simulate)
    write_metadata(exported.model, outputs=outputs)
    return exported


def _simulate_layer(graph: OnnxGraph, layer: OnnxLayer, quantizers: _Quantizers) -> str:
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
        integers = layer.integer_weight()
        replace_weight(graph, layer, integers, dtype=np.float32)
        layer = layer.with_own_bias(integers)
        if layer.adds_integers:
            replace_bias(graph, layer, layer.integer_bias().astype(np.float32))
        else:
            _replace_float_bias(graph, layer)
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


def _insert_dequantizer(graph: OnnxGraph, layer: OnnxLayer) -> str:
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


def _recurrent(graph: OnnxGraph, layer: OnnxLayer) -> None:
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


def _quantize_dequantize(graph: OnnxGraph, layer: OnnxLayer, number: str, tensor: str, qparams: QParams) -> str:
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
