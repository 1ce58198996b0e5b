"""The folded float model as ONNX, with each quantizable layer bound to the node that computes it.

The rules of ``lowering`` convert the captured program to a graph in which every node still refers to its module and
every initializer to its parameter. A program with an operation that has no rule is converted by torch.onnx,
unoptimized. This module then takes the weights from the folded model, removes folded batch norms, and gives nodes the
names of their layers and inputs and outputs the names that the user chose.
"""

from __future__ import annotations

import ast
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from amct.errors import ExportError
from amct.export.onnx.float_weights import large_float_weights
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer import further_node
from amct.export.onnx.layer_lookup import LayerBinding
from amct.export.onnx.messages import captures, check_valid, model_opset
from amct.export.onnx.rewrites import lower_opset, with_explicit_pool_padding, with_separate_zeros
from amct.export.request import check_opset
from amct.model.kinds import KIND_OF_TORCH_TYPE, LayerKind
from amct.model.operators import WITH_BIAS
from amct.numerics.arq import reorder_gates
from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.capture.functional_layers import layer_module, layer_name, named_tensors
from amct.pytorch.capture.program import quiet_exporters
from amct.pytorch.onnx.lowering.assembly import Lowered
from amct.pytorch.onnx.lowering.program import lower
from amct.pytorch.onnx.lowering.writer import SCOPES, NotLoweredError
from amct.pytorch.onnx.torch_exporter import exported_by_torch, original_names, root_cause
from amct.pytorch.user_model import as_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto
    from torch.export import ExportedProgram

    from amct.export.onnx.kept_weights import KeptWeights
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.inputs import IoNames, IoOptions


logger = logging.getLogger(__name__)

DEFAULT_OPSET = 18
_LOWEST_WRITTEN = 18  # of our rules and of torch.onnx; lower ones are converted to


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedOnnx:
    """A float ONNX model that belongs to a traced model.

    Attributes:
        model: The ONNX model; it has the requested opset.
        bindings: The node of each quantizable layer, which has the layer's name.
        tensors: The ONNX name of each activation of the topology that exists in the file.
    """

    model: ModelProto
    bindings: tuple[LayerBinding, ...]
    tensors: Mapping[str, str]


def float_onnx(
    traced: Traced, fused: Fused, *, opset: int = DEFAULT_OPSET, kept: KeptWeights | None = None
) -> TracedOnnx:
    """Convert the folded model to ONNX, in memory.

    Args:
        traced: the model; it must have a program.
        fused: its folded copy, whose parameters go into the file.
        opset: 16 to 21. GELU is one node from 20 on, several before.
        kept: takes the large parameters, which the folded model and the ONNX model then share; None: they are copied.

    Raises:
        ArgumentError: the opset is outside 16..21.
        ExportError: the model cannot be captured (the message has the user's line), or uses an operation that ONNX or
            the opset lacks.
    """
    check_opset(opset)
    if traced.program is None:
        raise ExportError(
            f"{type(traced.model).__name__} cannot be exported to ONNX, because it cannot be captured as a program: "
            f"{traced.failure}. Calibration works without; to export, express this by operations on tensors, or "
            'quantize a part of the model by its name (part="backbone")'
        )
    if not any(isinstance(output, str) for output in traced.program.graph_signature.user_outputs):
        raise ExportError(f"the forward of {type(traced.model).__name__} returns no tensor that a file could compute")
    stored = named_tensors(fused.model)
    lowered = _lowered(traced.program, traced.names, stored, max(opset, _LOWEST_WRITTEN))
    kinds = {name: KIND_OF_TORCH_TYPE[facts.type] for name, facts in traced.layers.items()}
    calls = {name: facts.calls for name, facts in traced.layers.items()}
    placed = _place_layers(lowered.model, fused, kinds, calls, _untied(traced.model, stored, kinds))
    model = with_separate_zeros(with_explicit_pool_padding(lower_opset(placed.graph.build(), opset)))
    values = {**stored, **placed.parameters}
    _name_by_origin(model, values)
    _finish(model, opset)
    _fill(model, values, kept)
    bindings = tuple(
        LayerBinding(layer=name, kind=kind, node=node) for name, kind in kinds.items() for node in placed.nodes[name]
    )
    tensors = _names_in(model, lowered.tensors, placed.replaced, placed.changed)
    return TracedOnnx(model=model, bindings=bindings, tensors=tensors)


def trace_for_files(
    model: nn.Module, example: object, *, io: IoOptions | None = None, stored_weights: bool = False
) -> Traced:
    """As ``cached_trace``, with a dynamic first axis where the model and the rules of its operations allow one."""
    traced = cached_trace(model, example, io=io, all_layers=True, stored_weights=stored_weights, any_batch=True)
    if traced.program is None or not traced.names.axes or (io is not None and io.dynamic_axes is not None):
        return traced
    problem = _why_not_lowered(traced)
    if problem is None:
        return traced
    logger.info("%s: the files take batches of one size only, because of %s", type(traced.model).__name__, problem)
    return cached_trace(model, example, io=io, all_layers=True, stored_weights=stored_weights)


def _why_not_lowered(traced: Traced) -> str | None:
    """Why our own rules cannot write a captured program; None if they can."""
    assert traced.program is not None
    stored = named_tensors(traced.model)
    try:
        try:
            lower(traced.program, traced.names, stored, _LOWEST_WRITTEN)
        except NotLoweredError:
            _lowered_without_writes(traced.program, traced.names, stored, _LOWEST_WRITTEN)
    except Exception as error:  # noqa: BLE001  torch.export raises many types
        return root_cause(error)
    return None


def _lowered(program: ExportedProgram, names: IoNames, stored: Mapping[str, torch.Tensor], opset: int) -> Lowered:
    """The program as ONNX: by our own rules, or by torch.onnx if an operation has none."""
    try:
        return lower(program, names, stored, opset)
    except NotLoweredError as error:
        logger.debug("the program is traced again for its export, because of %s", error)
    try:
        return _lowered_without_writes(program, names, stored, opset)
    except NotLoweredError as error:
        logger.debug("torch.onnx exports the program, because of %s", error)
    except Exception as error:  # noqa: BLE001  torch.export raises many types
        logger.debug("torch.onnx exports the program, because it cannot be traced again: %s", root_cause(error))
    return exported_by_torch(program, names, stored, opset)


def _lowered_without_writes(
    program: ExportedProgram, names: IoNames, stored: Mapping[str, torch.Tensor], opset: int
) -> Lowered:
    """Let torch replace operations in place and functions that are no operators, then lower the program."""
    with quiet_exporters(), torch.no_grad():
        plain = program.run_decompositions({})
    lowered = lower(plain, names, stored, opset)
    origins = original_names(program, plain)
    tensors = {origins[name]: tensor for name, tensor in lowered.tensors.items() if name in origins}
    return Lowered(model=lowered.model, tensors=tensors)


def _untied(model: nn.Module, stored: dict[str, torch.Tensor], layers: Collection[str]) -> frozenset[str]:
    """The weights of layers that replaced one which other modules share (an embedding); ``stored`` gets that one."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        if name in stored:  # not that of a folded batch norm
            sharing.setdefault(id(tensor), []).append(name)
    found: set[str] = set()
    for names in sharing.values():
        others = [name for name in names if name.rpartition(".")[0] not in layers]
        if others:
            shared = stored[others[0]]
            own = [name for name in names if stored[name] is not shared]
            stored.update(dict.fromkeys(own, shared))
            found.update(own)
    return frozenset(found)


def _name_by_origin(model: ModelProto, stored: Mapping[str, torch.Tensor]) -> None:
    """Name large weights that were computed from parameters after the parameter, or the module that reads them."""
    for weight in large_float_weights(model):
        modules = [layer_name(scope) for scope in _scopes(weight.readers[0])[:-1] if scope]
        if weight.name in stored or any(map(captures, weight.readers)):
            continue
        tensor = next(each for each in model.graph.initializer if each.name == weight.name)
        origin = _same_numbers(numpy_helper.to_array(tensor), stored)
        name = f"{origin}_rearranged" if origin else ".".join([*modules[-1:], weight.name])
        for node in weight.readers:
            node.input[:] = [name if each == weight.name else each for each in node.input]
        tensor.name = name


def _same_numbers(array: NDArray[Any], stored: Mapping[str, torch.Tensor]) -> str | None:
    """The parameter that has the same numbers in any order."""
    ordered = np.sort(array, axis=None)
    alike = (name for name, tensor in stored.items() if tensor.numel() == array.size)
    return next((name for name in alike if np.array_equal(np.sort(as_array(stored[name]), axis=None), ordered)), None)


def _finish(model: ModelProto, opset: int) -> None:
    """Remove the exporter's notes (they name the user's files), set the versions, check the result."""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    if model_opset(model) != opset:
        raise ExportError(f"the exported file has opset {model_opset(model)}, expected {opset}")
    check_valid(model, f"the exported model is not valid ONNX of opset {opset}")


def _array_view(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor as an array; a transposed matrix on the CPU shares its memory, too."""
    if tensor.dim() == 2 and not tensor.is_contiguous():
        return np.transpose(as_array(tensor.t()))
    return as_array(tensor)


def _fill(model: ModelProto, stored: Mapping[str, torch.Tensor], kept: KeptWeights | None) -> None:
    """Store the values of the parameters in the finished model, or refer to them."""
    for tensor in model.graph.initializer:
        if tensor.name in stored:
            array, name = _array_view(stored[tensor.name]), tensor.name
            filled = numpy_helper.from_array(array, name) if kept is None else kept.tensor(name, array)
            tensor.CopyFrom(filled)


def _names_in(
    model: ModelProto, tensors: Mapping[str, str], replaced: Mapping[str, str], changed: Collection[str]
) -> dict[str, str]:
    """The names of activations that exist in the finished model with the same values.

    ``replaced`` maps removed tensors to their replacements; ``changed`` lists tensors whose values differ.
    """
    existing = {output for node in model.graph.node for output in node.output}
    existing.update(value.name for value in model.graph.input)
    found: dict[str, str] = {}
    for origin, name in tensors.items():
        if name in changed:
            continue
        while name in replaced:
            name = replaced[name]
        if name in existing:
            found[origin] = name
    return found


_WEIGHTED = (*sorted(WITH_BIAS), "MatMul")


def _place_layers(
    model: ModelProto,
    fused: Fused,
    kinds: Mapping[str, LayerKind],
    calls: Mapping[str, int],
    untied: Collection[str] = (),
) -> _Placing:
    """Name and complete the nodes of the layers, and remove the folded batch norms.

    ``calls``: how often each layer is called. ``untied``: weights of layers that others read with other values.

    Raises:
        ExportError: a layer has no node of its kind, or several.
    """
    placing = _Placing(model, untied)
    nodes = _nodes_by_module(placing.graph, {*kinds, *fused.fusions, *fused.fusions.values()})
    unused = {layer for layer in fused.fusions if layer not in kinds and not nodes[layer]}  # no output depends on them
    for layer in dict.fromkeys([*kinds, *fused.fusions]):
        if layer in unused:
            continue
        operators = kinds[layer].operators if layer in kinds else _WEIGHTED
        own = _main_nodes(layer, nodes[layer], operators, calls.get(layer, 1))
        for call, node in enumerate(own):
            placing.graph.rename_node(node, further_node(layer, call) if call else layer)
            placing.complete(node, own, layer, layer_module(fused.model, layer))
        placing.nodes[layer] = [node.name for node in own]
    for norm in fused.fusions.values():
        is_gone = isinstance(fused.model.get_submodule(norm), nn.Identity)  # else it still has its activation
        gone = [node for node in nodes[norm] if is_gone or node.op_type == "BatchNormalization"]
        for of_one_call in _by_operation(gone):
            placing.bypass_norm(of_one_call)
    for node in [node for node in placing.graph.nodes if node.op_type == "Identity"]:
        placing.bypass(node.input[0], node.output[0], [node])
    return placing


def _nodes_by_module(graph: OnnxGraph, modules: set[str]) -> dict[str, list[NodeProto]]:
    found: dict[str, list[NodeProto]] = {module: [] for module in modules}
    for node in graph.nodes:
        for module in modules.intersection(map(layer_name, _scopes(node))):
            found[module].append(node)
    return found


def _scopes(node: NodeProto) -> list[str]:
    """The modules whose calls contain a node, outermost first, and the operation of the program that it is made of."""
    text = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    scopes: list[str] = ast.literal_eval(text)
    return scopes


def _by_operation(nodes: Iterable[NodeProto]) -> list[list[NodeProto]]:
    """The nodes of each operation of the program: of each call of a batch norm."""
    found: dict[str, list[NodeProto]] = {}
    for node in nodes:
        found.setdefault(_scopes(node)[-1], []).append(node)
    return list(found.values())


def _main_nodes(layer: str, nodes: Iterable[NodeProto], operators: tuple[str, ...], calls: int) -> list[NodeProto]:
    """The node of each call of a layer; a call whose result is not used has none."""
    found = [node for node in nodes if node.op_type in operators]
    if not 1 <= len(found) <= calls:
        expected = "one" if calls == 1 else f"1 to {calls}"
        raise ExportError(
            f'layer "{layer}": expected {expected} {" or ".join(operators)} in the exported graph, found '
            f"{', '.join(node.op_type for node in nodes) or 'nothing'}; skip the layer"
        )
    return found


def _recurrent_parameters(module: nn.RNNBase) -> tuple[Tensor, Tensor, Tensor | None]:
    """W ``[1, gates · hidden, input]``, R ``[1, gates · hidden, hidden]``, B ``[1, 2 · gates · hidden]`` or None."""
    order = (LayerKind.LSTM if isinstance(module, nn.LSTM) else LayerKind.GRU).onnx_gates
    weights = [reorder_gates(getattr(module, name).detach(), order) for name in ("weight_ih_l0", "weight_hh_l0")]
    if not module.bias:
        return weights[0][None], weights[1][None], None
    biases = [reorder_gates(getattr(module, name).detach(), order) for name in ("bias_ih_l0", "bias_hh_l0")]
    return weights[0][None], weights[1][None], torch.cat(biases)[None]


class _Placing:
    """A graph whose layers are named and completed.

    Attributes:
        graph: The graph; the values of ``parameters`` are not stored yet.
        untied: Weights of layers that others read with other values.
        parameters: Initializers created here, by name.
        nodes: The nodes of each layer, by name.
        replaced: For every removed tensor, the tensor that now has its values.
        changed: Tensors whose values differ from the program: outputs of layers with a folded batch norm.
    """

    def __init__(self, model: ModelProto, untied: Collection[str]) -> None:
        self.graph = OnnxGraph(model)
        self.untied = untied
        self.parameters: dict[str, torch.Tensor] = {}
        self.nodes: dict[str, list[str]] = {}
        self.replaced: dict[str, str] = {}
        self.changed: set[str] = set()

    # -- layers ----------------------------------------------------------------------------------------------------

    def complete(self, node: NodeProto, nodes: Sequence[NodeProto], layer: str, module: nn.Module) -> None:
        """Give a main node of a layer its weight and bias as initializers; ``nodes`` are all of the layer."""
        if isinstance(module, nn.RNNBase):
            for index, (name, tensor) in enumerate(zip("WRB", _recurrent_parameters(module), strict=True), start=1):
                self._put(node, index, f"{layer}.{name}", tensor)
            self.graph.set_attribute(node, "hidden_size", module.hidden_size)
        elif node.op_type == "MatMul":
            self._complete_product(node, nodes, layer, module)
        elif node.op_type in _WEIGHTED:
            for index, name in ((1, "weight"), (2, "bias")):
                stored = f"{layer}.{name}"
                self._put(node, index, f"{stored}.own" if stored in self.untied else stored, getattr(module, name))

    def _complete_product(self, node: NodeProto, nodes: Sequence[NodeProto], layer: str, module: nn.Module) -> None:
        """Complete a MatMul (a linear layer on more than two dimensions), which reads the weight transposed."""
        transpose = self.graph.producer(node.input[1])
        own = {id(self.graph.producer(each.input[1])) for each in nodes}
        is_tied = f"{layer}.weight" not in self.untied
        if (
            is_tied
            and transpose is not None
            and any(id(user) not in own for user in self.graph.consumers(transpose.input[0]))
        ):
            return  # shared with an embedding: transposing at run time keeps one copy in the file
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self._put(node, 1, f"{layer}.weight_transposed", weight.detach().t())

    def _put(self, node: NodeProto, index: int, name: str, tensor: torch.Tensor | None) -> None:
        """Store a parameter under a name and make it an input of a node; without a tensor the input is removed."""
        if tensor is None:
            if len(node.input) > index:
                self.graph.set_input(node, index, "")
            while node.input and not node.input[-1]:
                del node.input[-1]
        elif len(node.input) <= index or node.input[index] != name:
            self.parameters[name] = tensor
            self.graph.set_initializer(name, as_array(tensor.flatten()[:0]))
            self.graph.set_input(node, index, name)

    # -- removed nodes ---------------------------------------------------------------------------------------------

    def bypass_norm(self, nodes: Sequence[NodeProto]) -> None:
        """Connect all readers of a batch norm to its input."""
        graph = self.graph
        nodes = [node for node in nodes if not self._is_shared_constant(node, nodes)]
        made = {output for node in nodes for output in node.output}
        reads = {name for node in nodes for name in node.input if name and name not in made}
        inside = {id(node) for node in nodes}
        written = [
            name
            for name in made
            if graph.is_output(name) or any(id(user) not in inside for user in graph.consumers(name))
        ]
        sources = [name for name in reads if not graph.is_constant(name)]
        assert len(sources) == len(written) == 1  # a batch norm has one input and one output
        self.changed.add(sources[0])
        self.bypass(sources[0], written[0], nodes)

    def _is_shared_constant(self, node: NodeProto, nodes: Sequence[NodeProto]) -> bool:
        """Whether others than ``nodes`` read a constant: torch stores equal ones once, such as two equal epsilons."""
        inside = {id(other) for other in nodes}
        readers = [user for name in node.output for user in self.graph.consumers(name)]
        return node.op_type == "Constant" and any(id(user) not in inside for user in readers)

    def bypass(self, source: str, target: str, nodes: Sequence[NodeProto]) -> None:
        """Remove nodes that copy ``source`` to ``target`` unchanged; a graph output keeps its name."""
        graph = self.graph
        stays = graph.is_output(target) or graph.is_captured(target)
        if stays and nodes[0].op_type == "Identity":
            return
        for user in graph.consumers(target):
            for index, name in enumerate(user.input):
                if name == target and not stays:
                    graph.set_input(user, index, source)
        for node in nodes:
            graph.remove_node(node)
        if stays:
            graph.add_node("Identity", graph.fresh_name(f"{target}_output"), [source], [target])
        else:
            self.replaced[target] = source
