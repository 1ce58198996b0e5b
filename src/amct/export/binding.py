"""Which ONNX node computes which layer.

A front door creates them; everything else (weight, bias, groups, a bias added behind a MatMul) is found in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.errors import ExportError
from amct.model.kinds import KIND_OF_OPERATOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from onnx import ModelProto

    from amct.model.kinds import LayerKind


@dataclass(frozen=True, kw_only=True)
class LayerBinding:
    """A layer and a node that computes it; exported files name the node after the layer.

    A layer that is computed several times has several bindings; its further nodes are named ``<layer>@1`` and so on.
    """

    layer: str
    kind: LayerKind
    node: str


def further_node(layer: str, call: int) -> str:
    """The name of the node that computes a layer for the second (``call`` 1) or a later time."""
    return f"{layer}@{call}"


def bindings_by_name(
    model: ModelProto, layers: Iterable[str], calls: Mapping[str, int] | None = None
) -> list[LayerBinding]:
    """Bindings of a model whose nodes already have the names of their layers.

    ``calls``: how often each layer is computed, if more than once; nodes that do not exist are left out.

    Raises:
        ExportError: no node has the name, or its operator is not that of a quantizable layer.
    """
    operators = {node.name: node.op_type for node in model.graph.node}
    bindings = []
    for layer in layers:
        if operators.get(layer) not in KIND_OF_OPERATOR:
            found = f"it is a {operators[layer]}" if layer in operators else "there is no node of this name"
            raise ExportError(
                f'layer "{layer}": expected a node of one of the operators {", ".join(sorted(KIND_OF_OPERATOR))}, but '
                f"{found}; save the model that the record belongs to"
            )
        kind = KIND_OF_OPERATOR[operators[layer]]
        further = (further_node(layer, call) for call in range(1, (calls or {}).get(layer, 1)))
        nodes = [layer, *(node for node in further if node in operators)]
        bindings += [LayerBinding(layer=layer, kind=kind, node=node) for node in nodes]
    return bindings
