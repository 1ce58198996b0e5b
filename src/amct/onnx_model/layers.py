"""The layers of an ONNX model: quantizable nodes with their types and weights, and the reasons for all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from amct.config.layers import LayerInfo, LayerList
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer import replace_weight, shared_tensor
from amct.export.onnx.layer_lookup import LayerBinding, LayerMismatchError, find_layer, recurrent_problem
from amct.export.onnx.messages import attribute_value, subgraphs
from amct.model import Graph, Node, Skip
from amct.model.kinds import ANY_RANK, KIND_OF_OPERATOR
from amct.model.operators import FLOAT_WEIGHTED
from amct.pipeline.weights import FloatWeight

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.onnx.layer import OnnxLayer
    from amct.pipeline.weights import QuantizedWeights

_FLOATS = (np.float32, np.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLayer:
    """A quantizable layer.

    Attributes:
        type: Its name in configs: "Conv2d", "Linear", …
        layer: Its node, weight (in the layer's own layout) and bias.
    """

    type: str
    layer: OnnxLayer

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.layer.name

    @property
    def binding(self) -> LayerBinding:
        """The binding that exporters take."""
        return LayerBinding.of(self.layer.node)

    @property
    def can_pack(self) -> bool:
        """Whether two 4-bit weights can share a byte along the input channels."""
        return self.layer.weight is not None and self.layer.groups == 1 and self.layer.channels_in % 2 == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLayers:
    """The layers of a model.

    Attributes:
        found: The quantizable layers by name, in graph order.
        skips: Nodes with weights that stay float, with the reason.
        operators: The operator of every node except constants, by name, and of the layers in bodies of nodes.
    """

    found: Mapping[str, FoundLayer]
    skips: tuple[Skip, ...]
    operators: Mapping[str, str]

    def without_weights(self) -> FoundLayers:
        """The same layers without their arrays of weights, which are large."""
        found = {
            name: replace(each, layer=replace(each.layer, weight=None, recurrent_weight=None))
            for name, each in self.found.items()
        }
        return replace(self, found=found)

    def config_layers(self) -> LayerList:
        """The nodes in the form that the config package reads."""
        reasons = {skip.layer: skip.reason for skip in self.skips}
        return LayerList(self._info(name, reasons.get(name)) for name in self.operators)

    def _info(self, name: str, refusal: str | None) -> LayerInfo:
        found = self.found.get(name)
        if found is None:
            return LayerInfo(name=name, type=self.operators[name], refusal=refusal)
        has_bias = found.layer.bias is not None
        return LayerInfo(name=name, type=found.type, has_bias=has_bias, can_pack_int4=found.can_pack)


def find_all_layers(model: ModelProto) -> FoundLayers:
    """Find the layers of a model whose nodes have unique names."""
    graph = OnnxGraph(model)
    found: dict[str, FoundLayer] = {}
    skips: list[Skip] = []
    alive = {id(node) for node in graph.live_nodes()}
    for node in graph.nodes:
        if node.op_type in KIND_OF_OPERATOR and id(node) not in alive:
            skips.append(Skip(node.name, "no output of the model depends on it"))
        elif node.op_type in KIND_OF_OPERATOR and node.domain in ("", "ai.onnx"):
            layer = _read_layer(graph, node)
            if isinstance(layer, FoundLayer):
                found[node.name] = layer
            else:
                skips.append(Skip(node.name, layer))
        elif node.op_type in FLOAT_WEIGHTED:
            skips.append(Skip(node.name, f"{node.op_type} is not quantizable"))
    operators = {node.name: node.op_type for node in graph.nodes if node.op_type != "Constant"}
    for node in graph.nodes:
        for name, body_of, operator in _in_bodies(node):
            if operators.setdefault(name, operator) == operator:
                skips.append(Skip(name, f"it is inside the body of {body_of}; only the main graph is quantized"))
    return FoundLayers(found=found, skips=tuple(skips), operators=operators)


def _in_bodies(node: NodeProto) -> Iterator[tuple[str, str, str]]:
    """The layers in the bodies of an If, Loop or Scan: name, operator whose body it is, own operator."""
    for body in subgraphs(node):
        for child in body.node:
            if child.op_type in KIND_OF_OPERATOR:
                yield f"{node.name}/{child.name or child.output[0]}", node.op_type, child.op_type
            yield from _in_bodies(child)


def _read_layer(graph: OnnxGraph, node: NodeProto) -> FoundLayer | str:
    """The layer of a node, or the reason why it cannot be quantized."""
    problem = _operand_problem(graph, node) or _setting_problem(node)
    if problem is not None:
        return problem
    try:
        layer = find_layer(graph, LayerBinding.of(node))
    except LayerMismatchError as error:
        return error.reason
    kind = _type_of(graph, layer)
    if kind is None:
        return _dimension_problem(graph, layer)
    if layer.weight is not None and layer.weight.dtype not in _FLOATS:
        return f"its weight is {layer.weight.dtype}; only float32 and float16 can be quantized"
    if kind == "Conv3d" and (attribute_value(node, "dilations") or [1])[0] != 1:
        return f"dilations are {list(attribute_value(node, 'dilations'))}; the first must be 1 in a quantized Conv3d"
    return FoundLayer(type=kind, layer=layer)


def _operand_problem(graph: OnnxGraph, node: NodeProto) -> str | None:
    if graph.is_constant(node.input[0]):
        if node.op_type == "MatMul":
            return "its first operand is the constant one; only x · weight can be quantized"
        return "its input is a constant"
    if node.op_type == "AveragePool" or graph.is_constant(node.input[1]):
        return None
    if node.op_type == "MatMul":
        return "both operands are computed; only a product with a constant weight can be quantized"
    return f'its weight "{node.input[1]}" is computed; only constant weights can be quantized'


def _setting_problem(node: NodeProto) -> str | None:
    """The setting that prevents quantization of a recurrent layer; None for other layers."""
    if not KIND_OF_OPERATOR[node.op_type].is_recurrent:
        return None
    direction = attribute_value(node, "direction", "forward")
    if direction != "forward":
        return f'direction is "{direction}"; only "forward" can be quantized'
    return recurrent_problem(node)


def _rank(graph: OnnxGraph, layer: OnnxLayer) -> int | None:
    return layer.weight.ndim if layer.weight is not None else graph.rank(layer.node.input[0]) or _kernel_rank(layer)


def _kernel_rank(layer: OnnxLayer) -> int | None:
    kernel = attribute_value(layer.node, "kernel_shape")
    return len(kernel) + 2 if kernel else None


def _type_of(graph: OnnxGraph, layer: OnnxLayer) -> str | None:
    return layer.kind.torch_type(_rank(graph, layer) or ANY_RANK)


def _dimension_problem(graph: OnnxGraph, layer: OnnxLayer) -> str:
    dimensions = (_rank(graph, layer) or 2) - 2
    known = ", ".join(str(rank - 2) for rank in layer.kind.torch_types)
    return f"{layer.node.op_type} over {dimensions} dimensions cannot be quantized, only over {known}"


def reads_rescaled(layer: OnnxLayer, graph: OnnxGraph, rescaled: Collection[str]) -> bool:
    """Whether the layer that computes this one's input, possibly through a Relu, is among the rescaled ones."""
    producer = graph.producer(layer.reader.input[0])
    if producer is not None and producer.op_type == "Relu":
        producer = graph.producer(producer.input[0])
    return producer is not None and producer.name in rescaled


def topology(model: ModelProto) -> Graph:
    """The graph of producers and consumers, for finding batch norms that can be folded."""
    graph = OnnxGraph(model)
    inputs = [value.name for value in graph.inputs]
    captured = [name for node in graph.nodes for name in node.output if name and graph.is_captured(name)]
    known = {*inputs, *(name for node in graph.nodes for name in node.output)}
    nodes = [
        Node(
            name=node.name,
            op=node.op_type,
            inputs=tuple(name for name in node.input if name in known and not graph.is_constant(name)),
            outputs=tuple(name for name in node.output if name),
        )
        for node in graph.nodes
    ]
    outputs = [value.name for value in model.graph.output if value.name in known]
    return Graph(nodes, inputs=inputs, outputs=list(dict.fromkeys([*outputs, *captured])))


# -- weights -----------------------------------------------------------------------------------------------------------


def float_weights(layer: OnnxLayer) -> tuple[FloatWeight, ...]:
    """The float weights of a layer; none for average pooling."""
    arrays = {"weight": layer.weight, "recurrent weight": layer.recurrent_weight}
    return tuple(
        FloatWeight(
            name=name,
            tensor=shared_tensor(array),
            kind=layer.kind.weight_kind,
            groups=layer.groups,
            gates=layer.kind.gates,
        )
        for name, array in arrays.items()
        if array is not None
    )


def put_weights(weights: QuantizedWeights, graph: OnnxGraph, layer: OnnxLayer) -> None:
    """Store the dequantized weights in the layer's node of a graph; its input is not balanced there."""
    for index, weight in enumerate(weights.unbalanced().values(), start=1):
        array: NDArray[np.floating] = weight.numpy()
        replace_weight(graph, layer, array[np.newaxis] if layer.kind.is_recurrent else array, index)
