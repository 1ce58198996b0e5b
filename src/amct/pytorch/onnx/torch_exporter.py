"""The way out for a program with an operation that has no lowering rule: torch.onnx converts it.

The names of inputs, outputs, dynamic axes and activations are set on onnx_ir's graph, where renaming a value renames it
for all its consumers.
"""

from __future__ import annotations

import operator
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from amct.errors import ExportError
from amct.export.onnx.messages import fresh_name
from amct.pytorch.capture.functional_layers import layer_name
from amct.pytorch.capture.program import failure_of, plain_name, quiet_exporters
from amct.pytorch.capture.program_reader import place_in_code
from amct.pytorch.inputs import check_chosen_names
from amct.pytorch.onnx.lowering.assembly import Lowered
from amct.pytorch.onnx.lowering.program import LARGEST_CONSTANT
from amct.pytorch.user_model import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from onnx import ModelProto
    from torch import fx
    from torch.export import ExportedProgram

    from amct.pytorch.inputs import IoNames

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_UNKNOWN_OPERATOR = re.compile(r"OpOverload\(op='(?P<name>[\w.]+)', overload='(?P<overload>\w+)'\)")
Graph = Any  # onnx_ir.Graph; its types are not published
GraphValue = Any


def exported_by_torch(
    program: ExportedProgram, names: IoNames, stored: Mapping[str, torch.Tensor], opset: int
) -> Lowered:
    """The program as torch.onnx converts it, unoptimized, with the names that our own rules would give.

    Raises:
        ExportError: a parameter is complex or sparse, or torch.onnx cannot convert an operation; the message names it.
    """
    _refuse_complex_and_sparse(stored)
    converted = _converted(program, opset)
    _put_parameters(converted.model, stored)
    values = {value.name: value for value in _values(converted.model.graph)}
    origins = original_names(program, converted.exported_program)
    # With several nodes of one origin, the last one computes the result.
    tensors = {origin: values[name] for name, origin in origins.items() if name in values}
    _name_inputs_and_outputs(converted.model, names)
    _name_dimensions(converted.model, names)
    return Lowered(
        model=_simplified(converted.model), tensors={origin: str(value.name) for origin, value in tensors.items()}
    )


def _values(graph: Graph) -> Iterator[GraphValue]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _name_inputs_and_outputs(model: Any, names: IoNames) -> None:  # noqa: ANN401  onnx_ir.Model
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


def _name_dimensions(model: Any, names: IoNames) -> None:  # noqa: ANN401  onnx_ir.Model
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


def _refuse_complex_and_sparse(stored: Mapping[str, torch.Tensor]) -> None:
    """Raise an error for a parameter of a kind that ONNX lacks: torch.onnx fails, or writes what no runtime loads."""
    for name, tensor in stored.items():
        if tensor.is_complex():
            raise ExportError(
                f'"{name}" is complex, and ONNX files have real tensors only; store its real and imaginary part as '
                "real tensors and compute with both"
            )
        if tensor.layout is not torch.strided:
            raise ExportError(
                f'"{name}" is sparse ({str(tensor.layout).removeprefix("torch.")}), and ONNX files have dense tensors '
                "only; store it as a dense tensor (.to_dense())"
            )


def _converted(program: ExportedProgram, opset: int) -> Any:  # noqa: ANN401  torch.onnx.ONNXProgram, an optional import
    try:
        with quiet_exporters(), torch.no_grad():  # as the program was captured: gradients forbid some of its views
            return torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                optimize=False,  # its optimizer would fold batch norms that the user wants to keep
                verbose=False,
                custom_translation_table=dict(_translations()),
            )
    except Exception as error:
        reason = _missing_operator(program, str(error)) or root_cause(error)
        raise ExportError(f"torch.onnx cannot export the model: {reason}") from error


def _missing_operator(program: ExportedProgram, message: str) -> str:
    """The operator that torch.onnx names as unknown, with its place in the user's code; "" if it names none."""
    named = _UNKNOWN_OPERATOR.search(message)
    if named is None:
        return ""
    operator = f"{named['name']}.{named['overload']}"
    of = " for complex numbers" if "complex-valued" in message else ""
    place = _place_of(operator, program)
    if not place:  # what the user calls consists of it
        with suppress(Exception), quiet_exporters(), torch.no_grad():
            place = _place_of(operator, program.run_decompositions())
    return (
        f"the operator {operator}{f' ({place})' if place else ''} has no form in ONNX{of}; write it by other "
        "operations on tensors, or leave it out of the exported model"
    )


def _place_of(operator: str, program: ExportedProgram) -> str:
    name = operator.split(".")[1]
    names = (name, f"special_{name}")  # aten.special_bessel_j0 is made of prims.bessel_j0
    nodes = (node for node in program.graph.nodes if f"{node.target}..".split(".")[1] in names)
    return next((where for node in nodes if (where := place_in_code(node))), "")


def root_cause(error: BaseException) -> str:
    """The message of the innermost exception, which torch.onnx wraps in general advice, without its colors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _COLORS.sub("", failure_of(error).reason)


def _put_parameters(model: Any, stored: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401  onnx_ir.Model ships partial types
    """Set the initializers to the parameters and buffers of the folded model, by their names there.

    Small ones get their values, as constants may be computed from them. Large ones get only type and shape until the
    graph is finished, because copying them repeatedly is slow.
    """
    from onnxscript import ir

    for initializer in list(model.graph.initializers.values()):
        plain = plain_name(initializer.name)  # names with quotes are escaped in a captured program
        initializer.name = name = layer_name(plain) if layer_name(plain) in stored else plain
        if name not in stored:
            continue
        if stored[name].numel() <= LARGEST_CONSTANT:
            initializer.const_value = ir.tensor(as_array(stored[name]), name=name)
        else:
            initializer.const_value = ir.ExternalTensor(
                "later", None, None, initializer.dtype, shape=initializer.shape, name=name
            )


def _simplified(model: Any) -> ModelProto:  # noqa: ANN401  onnx_ir.Model ships partial types
    """Fold constants and drop unused nodes."""
    from onnxscript import ir, optimizer

    with quiet_exporters():
        optimizer.inline(model)
        optimizer.fold_constants(model, input_size_limit=LARGEST_CONSTANT)
        optimizer.remove_unused_nodes(model)
    proto: ModelProto = ir.to_proto(model)
    return proto


_Value = Any  # of the exporter's graph, or None


def _translations() -> Mapping[Any, Callable[..., Any]]:
    """The torch.onnx translation table for the operations of ``amct.pytorch.capture.program``, and what it gets wrong.

    The weights are placeholders: ``layers.py`` replaces them later. In torch, ``squeeze`` leaves an axis of another
    size than 1 alone; in ONNX it is an error.
    """
    from onnxscript import opset18

    operators: Any = opset18  # its type hints require tensors where lists are accepted too
    # Releases before 2.8 match arguments by name, and a missing state only with a parameter that has a default.

    def lstm(
        x: _Value,
        h: _Value = None,
        c: _Value = None,
        weight_ih: _Value = None,
        weight_hh: _Value = None,
        bias_ih: _Value = None,  # noqa: ARG001  the biases are in ``layers.py``
        bias_hh: _Value = None,  # noqa: ARG001
    ) -> _Value:
        output, last_h, last_c = operators.LSTM(x, weight_ih, weight_hh, None, None, h, c)
        return operators.Squeeze(output, [1]), last_h, last_c

    def gru(
        x: _Value,
        h: _Value = None,
        weight_ih: _Value = None,
        weight_hh: _Value = None,
        bias_ih: _Value = None,  # noqa: ARG001  the biases are in ``layers.py``
        bias_hh: _Value = None,  # noqa: ARG001
    ) -> _Value:
        output, last_h = operators.GRU(x, weight_ih, weight_hh, None, None, h, linear_before_reset=1)
        return operators.Squeeze(output, [1]), last_h

    def squeeze(x: _Value, dim: int | Sequence[int]) -> _Value:
        axes = [axis for axis in ([dim] if isinstance(dim, int) else dim) if not _is_longer(x.shape, axis)]
        return operators.Squeeze(x, axes) if axes else operators.Identity(x)

    return {
        torch.ops.amct.lstm.default: lstm,
        torch.ops.amct.gru.default: gru,
        torch.ops.aten.squeeze.dim: squeeze,
        torch.ops.aten.squeeze.dims: squeeze,
    }


def _is_longer(shape: Sequence[Any] | None, axis: int) -> bool:
    """Whether an axis certainly has another size than 1; a number has no axes, and may be squeezed."""
    if shape is None:
        return False
    return not len(shape) or (isinstance(shape[axis], int) and shape[axis] != 1)
