"""Sets the names in an exported graph: inputs, outputs and dynamic axes as the user chose, and activations.

Works on onnx_ir's graph, where renaming a value renames it for all its consumers.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

from amct.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from onnx import ModelProto
    from torch import fx
    from torch.export import ExportedProgram

    from amct.pytorch.onnx.io_names import IoNames

SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata of a node: the modules whose calls contain it, outermost first, and the operation it is made of."""

Graph = Any  # onnx_ir.Graph; its types are not published
GraphValue = Any


def _values(graph: Graph) -> Iterator[GraphValue]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def name_inputs_and_outputs(model: Any, names: IoNames) -> None:  # noqa: ANN401  onnx_ir.Model
    """Give inputs and outputs the requested names; other values with such a name are renamed.

    Raises:
        ExportError: more names than tensors, or a name that is already a parameter's.
    """
    graph = model.graph
    check_chosen_names(names, len(graph.outputs), graph.initializers)
    _separate_outputs(graph)
    wanted = [*zip(graph.inputs, names.inputs, strict=True), *zip(graph.outputs, names.outputs, strict=False)]
    chosen = {name for _, name in wanted}
    taken = {value.name for value in _values(graph)} | chosen
    for value in [value for value in _values(graph) if value.name in chosen]:
        value.name = fresh_name(value.name, taken)
    for value, name in wanted:
        value.name = name


def _separate_outputs(graph: Graph) -> None:
    """Give every output its own value, distinct from inputs, parameters and other outputs."""
    from onnxscript import ir

    seen: set[int] = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for index, value in enumerate(graph.outputs):
        if id(value) in seen:
            copy = ir.Node("", "Identity", [value], name=f"output_{index}_copy")
            copy.outputs[0].name = f"{value.name}_output_{index}"
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(id(graph.outputs[index]))


def check_chosen_names(names: IoNames, outputs: int, stored: Collection[str]) -> None:
    """Check the names of inputs and outputs against the number of outputs and the names of parameters.

    Raises:
        ExportError: more names than outputs, or a name that is already a parameter's.
    """
    if len(names.outputs) > outputs:
        raise ExportError(
            f"output_names: the model has {outputs} outputs, got {len(names.outputs)} names "
            f"({', '.join(names.outputs)})"
        )
    clashes = {*names.inputs, *names.outputs}.intersection(stored)
    if clashes:
        raise ExportError(
            f'"{min(clashes)}" is the name of a parameter of the model; choose another input or output name'
        )


def fresh_name(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is taken; it is taken afterwards."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate


def name_dimensions(model: Any, names: IoNames) -> None:  # noqa: ANN401  onnx_ir.Model
    """Rename the dynamic dimensions to the labels of ``dynamic_axes``, everywhere in the graph."""
    from onnxscript import ir

    by_name = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    labels: dict[str, str] = {}
    for name in names.inputs:
        for axis, label in names.axes.get(name, {}).items():
            labels[str(_text(by_name[name].shape[axis]))] = label
    if labels:
        for value in _values(model.graph):
            if value.shape is not None and any(not isinstance(size, int) for size in value.shape):
                value.shape = ir.Shape([_relabelled(size, labels) for size in value.shape])
    for name in names.outputs:
        for axis, label in names.axes.get(name, {}).items():
            _label_output(by_name[name], axis, label)


def _label_output(value: GraphValue, axis: int, label: str) -> None:
    from onnxscript import ir

    if value.shape is None:
        return
    if axis >= len(value.shape):
        raise ExportError(f'dynamic_axes["{value.name}"]: axis {axis} does not exist, it has {len(value.shape)} axes')
    sizes = list(value.shape)
    sizes[axis] = label
    value.shape = ir.Shape(sizes)


def _text(size: object) -> str:
    return str(getattr(size, "value", size))


def _relabelled(size: object, labels: Mapping[str, str]) -> int | str:
    """``s77`` becomes ``batch``, ``2*s77`` becomes ``2*batch``."""
    if isinstance(size, int):
        return size
    return re.sub(r"[A-Za-z_]\w*", lambda match: labels.get(match[0], match[0]), _text(size))


def original_names(program: ExportedProgram, changed: ExportedProgram) -> dict[str, str]:
    """For nodes of a changed program the node of the original one with the same values, by name."""
    originals = {node.name: node for node in program.graph.nodes}
    items = {
        (node.args[0].name, node.args[1]): node.name
        for node in program.graph.find_nodes(op="call_function", target=operator.getitem)
    }
    found: dict[str, str] = {}
    for node in changed.graph.nodes:
        if node.op not in ("call_function", "placeholder"):
            continue
        origin = originals.get(_origin(node))
        if node.target is operator.getitem and origin is not None and node.args[0].target == origin.target:
            origin = originals.get(items.get((origin.name, node.args[1]), ""))
        if origin is not None and _same_shape(node, origin):
            found[node.name] = origin.name
    return found


class ProgramTensors:
    """Maps activations of the topology to values of the graph; their names are read after all renaming."""

    def __init__(self, program: ExportedProgram, converted: Any) -> None:  # noqa: ANN401  torch.onnx.ONNXProgram
        by_name = {value.name: value for value in _values(converted.model.graph)}
        names = original_names(program, converted.exported_program)
        # With several nodes of one origin, the last one computes the result.
        self._values: dict[str, GraphValue] = {
            origin: by_name[name] for name, origin in names.items() if name in by_name
        }

    def names(self) -> dict[str, str]:
        """The names that the activations have now."""
        return {origin: str(value.name) for origin, value in self._values.items()}


def names_in(
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


def _same_shape(node: fx.Node, other: fx.Node) -> bool:
    shapes = [str(getattr(item.meta.get("val"), "shape", None)) for item in (node, other)]
    return shapes[0] == shapes[1] != "None"


def _origin(node: fx.Node) -> str:
    """The name that a node of the decomposed program has in the original program."""
    sources = node.meta.get("from_node") or ()
    name = node.name
    while sources:
        name = sources[-1].name
        sources = sources[-1].from_node or ()
    return str(name)
