"""Means over the positions of a picture, as squeeze-and-excitation blocks and classifiers compute them.

Exporters write them as ReduceMean, which onnxruntime computes in float only; a GlobalAveragePool computes the same and
has an integer kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.onnx.messages import attribute_value

if TYPE_CHECKING:
    from onnx import NodeProto

    from amct.export.onnx.graph import OnnxGraph

_PICTURE = 4  # [sample, channel, row, column]


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
