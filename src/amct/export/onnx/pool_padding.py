"""Rewrites average poolings with ceil_mode and counted padding so that every kernel divides by the same number.

ONNX counts the zeros that ``pads`` adds, but not the positions beyond them that ``ceil_mode`` adds for a last window;
onnxruntime's integer kernel counts both, as do its float kernels in some releases. If a Pad before the pooling adds the
zeros and the pooling itself counts none, the count is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import helper

from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def with_explicit_pool_padding(model: ModelProto) -> ModelProto:
    """The model with such poolings rewritten; the model itself if there are none."""
    if not any(_has_ambiguous_count(node) for node in model.graph.node):
        return model
    graph = OnnxGraph(model)
    for node in [node for node in graph.nodes if _has_ambiguous_count(node)]:
        pads = list(attribute_value(node, "pads", []))
        if any(pads):
            _add_pad(graph, node, pads)
        for name in ("pads", "count_include_pad"):
            graph.drop_attribute(node, name)
    return graph.build()


def with_separate_zeros(model: ModelProto) -> ModelProto:
    """The model with zeros that a Pad adds before a MaxPool kept apart from it; the model itself if there are none.

    onnxruntime merges such a Pad into the pooling, although that pads with minus infinity: a window of negative values
    at the border then loses its zero. It does not merge a Pad whose value is another than zero, however small.
    """
    if not {"Pad", "MaxPool"} <= {node.op_type for node in model.graph.node}:
        return model
    graph = OnnxGraph(model)
    readers = [(node, graph.only_consumer(node.output[0])) for node in graph.nodes if node.op_type == "Pad"]
    pads = [pad for pad, reader in readers if reader is not None and reader.op_type == "MaxPool"]
    for pad in [pad for pad in pads if is_zero_pad(graph, pad)]:
        dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(pad.input[0]))
        if dtype.kind != "f":  # integers have no value that is nearly zero
            continue
        value = graph.add_initializer(f"{pad.name}.zero", np.array(np.finfo(dtype).tiny, dtype))
        while len(pad.input) < 3:
            pad.input.append("")
        graph.set_input(pad, 2, value)
    return graph.build()


def _has_ambiguous_count(node: NodeProto) -> bool:
    if node.op_type != "AveragePool" or attribute_value(node, "auto_pad", "NOTSET") != "NOTSET":
        return False
    return bool(attribute_value(node, "ceil_mode", 0)) and bool(attribute_value(node, "count_include_pad", 0))


def _add_pad(graph: OnnxGraph, node: NodeProto, pads: list[int]) -> None:
    places = len(pads) // 2
    amounts = np.array([0, 0, *pads[:places], 0, 0, *pads[places:]], dtype=np.int64)
    name = graph.fresh_name(f"{node.name}.pad")
    stored = graph.add_initializer(f"{name}.pads", amounts)
    graph.set_input(node, 0, graph.add_node("Pad", name, [node.input[0], stored]))
