"""Sums before a LayerNorm, which onnxruntime would compute together with it by a slower kernel.

Behind a residual block whose sum only a LayerNorm reads (BERT and its kin), onnxruntime fuses Add and
LayerNormalization to a SkipLayerNormalization. On CPUs that kernel adds value by value: it takes four to seven times as
long as both operators apart. A Sum of two tensors computes the same as their Add and is not fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto

from amct.export.qdq.residual_streams import is_computed_sum, normalizations
from amct.model.operators import LAYER_NORM_READERS

if TYPE_CHECKING:
    from amct.export.onnx.graph import OnnxGraph

_RANK = 3  # [sample, position, channel]; others are not fused


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
