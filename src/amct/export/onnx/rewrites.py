"""Rewrites of a model that keep what it computes: for an older opset, and so that every runtime computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import onnx
from onnx import TensorProto, helper

from amct.errors import ExportError
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.layer_lookup import is_zero_pad
from amct.export.onnx.messages import attribute_value

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def lower_opset(model: ModelProto, opset: int) -> ModelProto:
    """Lower the model to ``opset``; a model at this opset is returned unchanged.

    Raises:
        ExportError: an operator does not exist in that opset and cannot be expressed by others.
    """
    if opset >= _HIGHEST_RULE:
        return model
    written = next(entry for entry in model.opset_import if entry.domain == "")
    graph = OnnxGraph(model)
    for node in list(graph.nodes):
        for needed, rule in _RULES.get(node.op_type, ()):
            if opset < needed:
                rule(graph, node)
    lowered = graph.build()
    if written.version > opset:
        next(entry for entry in lowered.opset_import if entry.domain == "").version = opset
        for node in lowered.graph.node:
            _check_exists(node, opset)
    return lowered


def _check_exists(node: NodeProto, opset: int) -> None:
    try:
        onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        _refuse(node, f"opset {opset} has no such operator")
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                if inner.op_type in _RULES:
                    _refuse(inner, f"it is inside {node.op_type}, where it cannot be rewritten for opset {opset}")
                _check_exists(inner, opset)


def _refuse(node: NodeProto, reason: str) -> NoReturn:
    raise ExportError(f'node "{node.name}" ({node.op_type}): {reason}; choose a higher opset')


# -- rules -------------------------------------------------------------------------------------------------------------


def _axes_to_attribute(graph: OnnxGraph, node: NodeProto) -> None:
    """Reductions: make the axes an attribute, as before opset 18."""
    keeps_all = bool(attribute_value(node, "noop_with_empty_axes", 0))
    graph.drop_attribute(node, "noop_with_empty_axes")
    if len(node.input) < 2 or not node.input[1]:
        if keeps_all:
            _refuse(node, "it reduces nothing, which cannot be said in this opset")
        return
    axes = graph.constant(node.input[1])
    if axes is None:
        _refuse(node, "its axes are computed while the model runs, not constant")
    graph.set_input(node, 1, "")
    del node.input[1:]
    graph.set_attribute(node, "axes", [int(axis) for axis in axes.reshape(-1)])


def _equal_split(graph: OnnxGraph, node: NodeProto) -> None:
    """Split: remove ``num_outputs`` (opset 18); without sizes, Split makes equal parts, one per output."""
    graph.drop_attribute(node, "num_outputs")
    if len(node.input) > 1 and node.input[1]:
        return
    axis = int(attribute_value(node, "axis", 0))
    sizes = {graph.dimension(name, axis) for name in node.output}
    if len(sizes) != 1 or None in sizes:
        _refuse(node, f"it makes {len(node.output)} parts that are not known to be equal")


def _plain_resize(graph: OnnxGraph, node: NodeProto) -> None:
    """Resize: remove the settings of opset 18; values other than the defaults are rejected."""
    for name, default in (("antialias", 0), ("axes", None), ("keep_aspect_ratio_policy", "stretch")):
        value = attribute_value(node, name, default)
        if value != default:
            _refuse(node, f"it has {name}={value!r}")
        graph.drop_attribute(node, name)


def _known_reduction(_: OnnxGraph, node: NodeProto) -> None:
    """ScatterElements, ScatterND: reject max and min, which exist from opset 18."""
    reduction = attribute_value(node, "reduction", "none")
    if reduction in ("max", "min"):
        _refuse(node, f'it has reduction="{reduction}"')


def _padded_axes(graph: OnnxGraph, node: NodeProto) -> None:
    """Pad: list every axis, as before opset 18."""
    if len(node.input) < 4 or not node.input[3]:
        return
    rank, axes, pads = graph.rank(node.input[0]), graph.constant(node.input[3]), graph.constant(node.input[1])
    if rank is None or axes is None or pads is None:
        _refuse(node, "its axes or pads are computed while the model runs, not constant")
    everywhere = np.zeros(2 * rank, dtype=np.int64)
    for number, axis in enumerate(axes.reshape(-1)):
        everywhere[int(axis) % rank] = pads[number]
        everywhere[int(axis) % rank + rank] = pads[number + axes.size]
    graph.set_input(node, 1, graph.add_initializer(f"{node.name}_pads", everywhere))
    graph.set_input(node, 3, "")
    del node.input[3:]


def _wrapped_pad(graph: OnnxGraph, node: NodeProto) -> None:
    """Pad with mode wrap (opset 19): concatenate the opposite ends to the tensor, axis by axis."""
    if attribute_value(node, "mode", "constant") != "wrap":
        return
    pads = graph.constant(node.input[1])
    if pads is None or pads.min() < 0:
        _refuse(node, "its pads are negative or computed while the model runs")
    rank = pads.size // 2
    sides = [(axis, int(pads[axis]), int(pads[axis + rank])) for axis in range(rank)]
    sides = [side for side in sides if any(side[1:])]
    tensor = node.input[0]
    graph.remove_node(node)
    if not sides:
        graph.add_node("Identity", node.name, [tensor], list(node.output))
    for axis, before, after in sides:
        parts = [tensor]
        if before:
            parts.insert(0, _slice(graph, node, tensor, axis, (-before, np.iinfo(np.int64).max)))
        if after:
            parts.append(_slice(graph, node, tensor, axis, (0, after)))
        outputs = list(node.output) if axis == sides[-1][0] else None
        tensor = graph.add_node("Concat", graph.fresh_name(f"{node.name}_wrap"), parts, outputs, axis=axis)


def _slice(graph: OnnxGraph, node: NodeProto, tensor: str, axis: int, ends: tuple[int, int]) -> str:
    name = graph.fresh_name(f"{node.name}_end")
    limits = [
        graph.add_initializer(f"{name}.{part}", np.array([value], dtype=np.int64))
        for part, value in (("starts", ends[0]), ("ends", ends[1]), ("axes", axis))
    ]
    return graph.add_node("Slice", name, [tensor, *limits])


def _spelled_out_mish(graph: OnnxGraph, node: NodeProto) -> None:
    """Mish (opset 18): x · tanh(softplus(x))."""
    graph.remove_node(node)
    soft = graph.add_node("Softplus", graph.fresh_name(f"{node.name}_softplus"), [node.input[0]])
    gate = graph.add_node("Tanh", graph.fresh_name(f"{node.name}_tanh"), [soft])
    graph.add_node("Mul", graph.fresh_name(f"{node.name}_mul"), [node.input[0], gate], list(node.output))


def _spelled_out_layer_norm(graph: OnnxGraph, node: NodeProto) -> None:
    """LayerNormalization (opset 17): (x - mean) / sqrt(variance + epsilon) · scale + bias, in float32."""
    if any(node.output[1:]):
        _refuse(node, "its mean or deviation is used")
    axis, rank = int(attribute_value(node, "axis", -1)), graph.rank(node.input[0])
    if axis >= 0 and rank is None:
        _refuse(node, "the rank of its input is unknown")
    axes = list(range(axis if axis < 0 else axis - (rank or 0), 0))
    given = graph.element_type(node.input[0])
    graph.remove_node(node)

    def add(operator: str, *inputs: str, outputs: list[str] | None = None, **attributes: object) -> str:
        name = graph.fresh_name(f"{node.name}_{operator.lower()}")
        return graph.add_node(operator, name, inputs, outputs, **attributes)

    x = node.input[0] if given == TensorProto.FLOAT else add("Cast", node.input[0], to=TensorProto.FLOAT)
    centred = add("Sub", x, add("ReduceMean", x, axes=axes, keepdims=1))
    variance = add("ReduceMean", add("Mul", centred, centred), axes=axes, keepdims=1)
    epsilon = np.array(attribute_value(node, "epsilon", 1e-5), dtype=np.float32)
    stored = graph.add_initializer(f"{node.name}_epsilon", epsilon)
    result = add("Div", centred, add("Sqrt", add("Add", variance, stored)))
    result = result if given == TensorProto.FLOAT else add("Cast", result, to=given)
    if len(node.input) > 2 and node.input[2]:
        add("Add", add("Mul", result, node.input[1]), node.input[2], outputs=[node.output[0]])
    else:
        add("Mul", result, node.input[1], outputs=[node.output[0]])


Rule = Callable[[OnnxGraph, "NodeProto"], None]
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
_RULES: Mapping[str, tuple[tuple[int, Rule], ...]] = MappingProxyType(
    {
        **{f"Reduce{name}": ((18, _axes_to_attribute),) for name in _REDUCTIONS},
        "LayerNormalization": ((17, _spelled_out_layer_norm),),
        "Mish": ((18, _spelled_out_mish),),
        "Pad": ((18, _padded_axes), (19, _wrapped_pad)),
        "Resize": ((18, _plain_resize),),
        "ScatterElements": ((18, _known_reduction),),
        "ScatterND": ((18, _known_reduction),),
        "Split": ((18, _equal_split),),
    }
)
"""By operator: the first opset that supports it unchanged, and the rule for lower opsets."""
_HIGHEST_RULE = max(needed for rules in _RULES.values() for needed, _ in rules)


def with_explicit_pool_padding(model: ModelProto) -> ModelProto:
    """The model with average poolings that divide by the same number in every kernel; the model itself if all do.

    With ceil_mode and counted padding ONNX counts the zeros that ``pads`` adds, but not the positions beyond them that
    ``ceil_mode`` adds for a last window; onnxruntime's integer kernel counts both, as do its float kernels in some
    releases. If a Pad before the pooling adds the zeros and the pooling counts none, the count is the same everywhere.
    """
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


def with_separate_zeros(model: ModelProto) -> ModelProto:
    """The model with zeros that a Pad adds before a MaxPool kept apart from it; the model itself if there are none.

    onnxruntime merges such a Pad into the pooling, although that pads with minus infinity: a window of negative values
    at the border then loses its zero. It does not merge a Pad whose value is another than zero, however small.
    """
    if not {"Pad", "MaxPool"} <= {node.op_type for node in model.graph.node}:
        return model
    graph = OnnxGraph(model)
    readers = [(node, graph.only_consumer(node.output[0])) for node in graph.nodes if node.op_type == "Pad"]
    pads = [pad for pad, reader in readers if reader is not None and reader.op_type == "MaxPool"]
    for pad in [pad for pad in pads if is_zero_pad(graph, pad)]:
        dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(pad.input[0]))
        if dtype.kind != "f":  # integers have no value that is nearly zero
            continue
        value = graph.add_initializer(f"{pad.name}.zero", np.array(np.finfo(dtype).tiny, dtype))
        while len(pad.input) < 3:
            pad.input.append("")
        graph.set_input(pad, 2, value)
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


_LEAST_RAISED = 18
_WIDENED = frozenset({
    "AveragePool", "Cast", "Constant", "ConstantOfShape", "DequantizeLinear", "Equal", "Flatten", "Identity", "If",
    "IsInf", "IsNaN", "Loop", "Pad", "QuantizeLinear", "ReduceMax", "ReduceMin", "Reshape", "Scan", "Shape", "Size",
    "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators of which opsets 19 to 21 only take more types and have more options than opset 18."""


def can_be_raised(nodes: Iterable[NodeProto], opset: int, wanted: int) -> bool:
    """Whether nodes of an opset mean the same in a later one; false for opsets before 18."""
    return opset >= wanted or (
        opset >= _LEAST_RAISED and all(_means_the_same(node, opset, wanted) for node in nodes if not node.domain)
    )


def _means_the_same(node: NodeProto, opset: int, wanted: int) -> bool:
    inner = (inside for attribute in node.attribute if attribute.HasField("g") for inside in attribute.g.node)
    versions = {onnx.defs.get_schema(node.op_type, each).since_version for each in (opset, wanted)}
    return (len(versions) == 1 or node.op_type in _WIDENED) and all(_means_the_same(x, opset, wanted) for x in inner)


def raise_opset(model: ModelProto, opset: int) -> None:
    """Say a later opset, where ``can_be_raised``."""
    written = next(entry for entry in model.opset_import if entry.domain == "")
    if written.version < opset:
        written.version = opset
        needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
        model.ir_version = max(model.ir_version, needed)
