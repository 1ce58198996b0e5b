"""Finds the layers in an exported graph and makes each look as the exporters want it.

A layer's main node gets the layer's name and reads its weight and bias straight from initializers; a folded batch norm
disappears.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.errors import ExportError
from amct.export.graph import OnnxGraph
from amct.pytorch.arrays import as_array
from amct.pytorch.onnx_recurrent import onnx_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from onnx import ModelProto, NodeProto

    from amct.export.binding import LayerKind
    from amct.pytorch.fuse import Fused

_SCOPES = "pkg.torch.onnx.name_scopes"
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def place_layers(model: ModelProto, fused: Fused, kinds: Mapping[str, LayerKind]) -> tuple[ModelProto, dict[str, str]]:
    """Name and complete the nodes of the layers, take the folded batch norms out.

    Returns:
        The model, and for every tensor that is gone the one that has its values now.

    Raises:
        ExportError: a layer has no node of its kind, or several.
    """
    graph = OnnxGraph(model)
    nodes = _nodes_by_module(graph, {*kinds, *fused.fusions, *fused.fusions.values()})
    for layer in dict.fromkeys([*kinds, *fused.fusions]):
        operators = kinds[layer].operators if layer in kinds else _WEIGHTED
        _complete(graph, _main_node(layer, nodes[layer], operators), layer, fused.model.get_submodule(layer))
    replaced: dict[str, str] = {}
    for norm in fused.fusions.values():
        _bypass_norm(graph, nodes[norm], replaced)
    for node in [node for node in graph.nodes if node.op_type == "Identity"]:
        _bypass(graph, node.input[0], node.output[0], [node], replaced)
    return graph.build(), replaced


def _nodes_by_module(graph: OnnxGraph, modules: set[str]) -> dict[str, list[NodeProto]]:
    found: dict[str, list[NodeProto]] = {module: [] for module in modules}
    for node in graph.nodes:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
        for module in modules.intersection(ast.literal_eval(scopes)):
            found[module].append(node)
    return found


def _main_node(layer: str, nodes: Iterable[NodeProto], operators: tuple[str, ...]) -> NodeProto:
    found = [node for node in nodes if node.op_type in operators]
    if len(found) != 1:
        raise ExportError(
            f'layer "{layer}": expected one {" or ".join(operators)} in the exported graph, found '
            f"{', '.join(node.op_type for node in nodes) or 'nothing'}; skip the layer"
        )
    return found[0]


def _complete(graph: OnnxGraph, node: NodeProto, layer: str, module: nn.Module) -> None:
    graph.rename_node(node, layer)
    if node.op_type in ("LSTM", "GRU"):
        _complete_recurrent(graph, node, layer, module)
    elif node.op_type == "MatMul":
        _complete_product(graph, node, layer, module)
    elif node.op_type in _WEIGHTED:
        _put(graph, node, 1, f"{layer}.weight", module.weight)
        _put(graph, node, 2, f"{layer}.bias", module.bias)


def _complete_recurrent(graph: OnnxGraph, node: NodeProto, layer: str, module: nn.Module) -> None:
    assert isinstance(module, nn.RNNBase)
    for index, (name, tensor) in enumerate(zip("WRB", onnx_parameters(module), strict=True), start=1):
        _put(graph, node, index, f"{layer}.{name}", tensor)
    graph.set_attribute(node, "hidden_size", module.hidden_size)


def _complete_product(graph: OnnxGraph, node: NodeProto, layer: str, module: nn.Module) -> None:
    """A linear layer on more than two dimensions is a MatMul: it wants the weight transposed."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    transpose = graph.producer(node.input[1])
    if transpose is not None and graph.only_consumer(transpose.input[0]) is None:
        return  # an embedding uses the same table: transposing at run time keeps one copy in the file
    _put(graph, node, 1, f"{layer}.weight_transposed", weight.detach().t())


def _put(graph: OnnxGraph, node: NodeProto, index: int, name: str, tensor: object) -> None:
    """Let an input of a node be this parameter, stored under this name; without a tensor there is no such input."""
    if tensor is None:
        if len(node.input) > index:
            graph.set_input(node, index, "")
        while node.input and not node.input[-1]:
            del node.input[-1]
        return
    assert isinstance(tensor, torch.Tensor)
    if len(node.input) <= index or node.input[index] != name:
        graph.set_initializer(name, as_array(tensor))
        graph.set_input(node, index, name)


def _bypass_norm(graph: OnnxGraph, nodes: Sequence[NodeProto], replaced: dict[str, str]) -> None:
    """Let everybody who read the batch norm read what it read."""
    made = {output for node in nodes for output in node.output}
    read = {name for node in nodes for name in node.input if name and name not in made and not graph.is_constant(name)}
    inside = {id(node) for node in nodes}
    written = {
        name for name in made if graph.is_output(name) or any(id(user) not in inside for user in graph.consumers(name))
    }
    assert len(read) == len(written) == 1  # a batch norm has one input and one output
    _bypass(graph, read.pop(), written.pop(), nodes, replaced)


def _bypass(graph: OnnxGraph, source: str, target: str, nodes: Iterable[NodeProto], replaced: dict[str, str]) -> None:
    """Take nodes out that make ``target`` of ``source`` without changing it; an output of the model keeps its name."""
    nodes = list(nodes)
    if graph.is_output(target) or graph.is_captured(target):
        if len(nodes) == 1 and nodes[0].op_type == "Identity":
            return
        for node in nodes:
            graph.remove_node(node)
        graph.add_node("Identity", graph.fresh_name(f"{target}_output"), [source], [target])
        return
    for user in graph.consumers(target):
        for index, name in enumerate(user.input):
            if name == target:
                graph.set_input(user, index, source)
    for node in nodes:
        graph.remove_node(node)
    replaced[target] = source
