"""Rewrites average poolings with ceil_mode and counted padding so that every kernel divides by the same number.

ONNX counts the zeros that ``pads`` adds, but not the positions beyond them that ``ceil_mode`` adds for a last window;
onnxruntime's integer kernel counts both, as do its float kernels in some releases. If a Pad before the pooling adds the
zeros and the pooling itself counts none, the count is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from amct.export.onnx.graph import OnnxGraph
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
