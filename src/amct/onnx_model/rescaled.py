"""Finds layers of a QDQ file that make other values than in the float model, on purpose.

Where a layer alone feeds another one, the factors that balance the second one's input may stand in the weights of the
first: its output channels are divided by them. What both files call by one name is then not the same, and comparing it
would tell of harm where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.qdq.balance import RESCALED

if TYPE_CHECKING:
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer


def rescaled_layers(graph: OnnxGraph) -> set[str]:
    """The nodes of a model that say so of themselves."""
    return {node.name for node in graph.nodes if node.doc_string == RESCALED}


def balanced_by_maker(layer: Layer, own: OnnxGraph, rescaled: set[str]) -> bool:
    """Whether the layer that makes this one's input, perhaps through a Relu, is among the rescaled ones."""
    producer = own.producer(layer.reader.input[0])
    if producer is not None and producer.op_type == "Relu":
        producer = own.producer(producer.input[0])
    return producer is not None and producer.name in rescaled
