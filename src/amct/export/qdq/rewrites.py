"""Rewrites of the float graph for placement ``fast``: the same values by what onnxruntime computes faster.

* **Means over the positions of a picture**, as squeeze-and-excitation blocks and classifiers compute them, are written
  as ReduceMean, which onnxruntime computes in float only; a GlobalAveragePool computes the same in integers.
* **Zeros that a Pad adds before a convolution**, as TensorFlow and models converted from it write them: a convolution
  adds them itself, on each side as many as wanted, without a copy of its input. A quantizer has an integer for zero, so
  it does not matter whether the zeros are added before it or behind it.
* **Sums before a LayerNorm** (BERT and its kin): onnxruntime fuses Add and LayerNormalization to a
  SkipLayerNormalization, which on CPUs adds value by value: four to seven times as long as both operators apart. A Sum
  of two tensors computes the same as their Add and is not fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto

from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value
from amct.export.qdq.float_tensors import is_computed_sum, normalizations
from amct.model.operators import LAYER_NORM_READERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer
    from amct.export.qdq.placement import LayerInput

_PICTURE = 4  # [sample, channel, row, column]
_RANK = 3  # [sample, position, channel]; others are not fused


def means_to_pooling(graph: OnnxGraph) -> None:
    """Turn each ReduceMean over rows and columns that keeps its axes into a GlobalAveragePool, in place."""
    for node in graph.nodes:
        if node.op_type == "ReduceMean" and _is_mean_of_positions(graph, node):
            node.op_type = "GlobalAveragePool"
            graph.set_inputs(node, node.input[:1])
            for name in ("axes", "keepdims", "noop_with_empty_axes"):
                graph.drop_attribute(node, name)


def _is_mean_of_positions(graph: OnnxGraph, node: NodeProto) -> bool:
    axes = attribute_value(node, "axes", None)  # an input since opset 18
    if len(node.input) > 1 and node.input[1]:
        constant = graph.constant(node.input[1])
        axes = None if constant is None else constant.reshape(-1).tolist()
    if axes is None or graph.rank(node.input[0]) != _PICTURE or attribute_value(node, "keepdims", 1) != 1:
        return False
    return sorted(axis % _PICTURE for axis in axes) == [2, 3]


def merge_pads(graph: OnnxGraph, layers: Sequence[Layer], inputs: Mapping[str, LayerInput]) -> dict[str, str]:
    """Merge each zero Pad into the convolution that alone reads it, in place.

    Returns by name of the convolution the tensor that it read, under which its input was observed. A Pad stays if its
    input is read by other layers with other factors: it would have to be quantized once more.
    """
    merged = {}
    for pad in [node for node in graph.nodes if node.op_type == "Pad"]:
        reader = graph.only_consumer(pad.output[0])
        readers = [inputs[layer.name] for layer in layers if layer.reader.input[0] in (pad.input[0], pad.output[0])]
        if reader is None or not _is_convolution_of(reader, pad) or not _agree(readers):
            continue
        amounts = _amounts(graph, pad, reader)
        if amounts is None:
            continue
        merged[reader.name] = pad.output[0]
        graph.set_input(reader, 0, pad.input[0])
        graph.set_attribute(reader, "pads", amounts)
        graph.drop_attribute(reader, "auto_pad")
        graph.remove_node(pad)
    return merged


def _is_convolution_of(reader: NodeProto, pad: NodeProto) -> bool:
    own = attribute_value(reader, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return reader.op_type == "Conv" and own and list(reader.input).index(pad.output[0]) == 0


def _agree(readers: Sequence[LayerInput]) -> bool:
    """Whether all layers that read the input or the output of a Pad have the same parameters."""
    if len(readers) < 2:
        return True
    bits, source = readers[0].bits, readers[0].source
    return all(not each.is_balanced and each.bits == bits and each.source.is_like(source) for each in readers)


def _amounts(graph: OnnxGraph, pad: NodeProto, convolution: NodeProto) -> list[int] | None:
    """The zeros before and behind each place that a convolution and the Pad before it add; None if it cannot."""
    given = graph.constant(pad.input[1])
    weight = graph.rank(convolution.input[1])
    if given is None or weight is None or not is_zero_pad(graph, pad):
        return None
    axes = list(range(weight))
    if len(pad.input) > 3 and pad.input[3]:
        named = graph.constant(pad.input[3])
        if named is None:
            return None
        axes = [int(axis) % weight for axis in named]
    added = given.reshape(2, -1).tolist()
    before, behind = (dict(zip(axes, side, strict=True)) for side in added)
    if any(amount < 0 or (axis < 2 and amount) for side in (before, behind) for axis, amount in side.items()):
        return None
    own = attribute_value(convolution, "pads", [0] * (2 * (weight - 2)))
    wanted = [side.get(axis, 0) for side in (before, behind) for axis in range(2, weight)]
    return [one + other for one, other in zip(own, wanted, strict=True)]


def keep_sums_apart(graph: OnnxGraph) -> None:
    """Turn each Add of computed tensors whose only reader is a LayerNorm into a Sum, in place."""
    for _, tensor in list(normalizations(graph)):
        node = graph.producer(tensor)
        if node is None or node.op_type != "Add" or not is_computed_sum(graph, node):
            continue
        fused = graph.rank(tensor) in (_RANK, None) and graph.element_type(tensor) == TensorProto.FLOAT
        readers = {reader.op_type for reader in graph.consumers(tensor)}
        if fused and readers <= LAYER_NORM_READERS and not graph.is_output(tensor) and not graph.is_captured(tensor):
            node.op_type = "Sum"
