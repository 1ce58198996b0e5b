"""Zeros that a Pad adds before a convolution, as TensorFlow and models converted from it write them.

A convolution adds the same zeros itself, on each side as many as wanted, without a copy of its input. A quantizer has
an integer for zero, so it does not matter whether the zeros are added before it or behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer
    from amct.export.qdq.placement import LayerInput


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
