"""Reads a float ONNX model and normalizes it to the form that the rest of this package needs.

Every invalid file (truncated, cyclic, pointing to files outside its folder, already quantized) gives one clear error
instead of a library crash. In the result every node has a unique name, there are no local functions, the opset is
supported by the exporters, shapes are declared, and no weights are listed as inputs.
"""

from __future__ import annotations

import heapq
import os
import re
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto, helper, inliner, version_converter

from amct.atomic import Snapshot, read_bytes
from amct.errors import ArgumentTypeError, ModelError, ParseError
from amct.export.onnx.checked import (
    check_function_sizes,
    check_loops,
    check_tensors,
    check_texts,
    decode_model,
    load_external,
)
from amct.export.onnx.kept_weights import KeptWeights, is_large, light_copy, with_weights_beside
from amct.export.onnx.messages import captures, check_sizes, copied_node, first_line, fresh_name, model_opset, reads
from amct.export.onnx.rewrites import with_explicit_pool_padding
from amct.export.request import OPSETS, check_opset
from amct.memory import give_back_freed
from amct.model.operators import ASCEND, QUANTIZED

AnyModel = str | os.PathLike[str] | bytes | ModelProto
"""A path, the bytes of a file, or a model in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceModel:
    """A model as read.

    Attributes:
        name: The file's name without its suffix, or the graph's name.
        model: The normalized model; never changed.
        kept: The weights beside the model; they exist as long as this object.
    """

    name: str
    model: ModelProto
    kept: KeptWeights | None = None


def read_model(
    model: AnyModel, argument: str = "model", *, allow_quantized: bool = False, keep_weights: bool = False
) -> SourceModel:
    """Read, check and normalize a model.

    Args:
        model: a path, the bytes of a file, or a ModelProto, which is not changed.
        argument: the argument's name in messages.
        allow_quantized: whether quantized operators are accepted (for comparing); the opset is then kept.
        keep_weights: whether large weights are beside the message (``kept_weights.py``), for a model that is edited.

    Raises:
        ArgumentTypeError: it has another type.
        FileError: the file, or a file with its external tensors, cannot be read.
        ParseError: it is not ONNX, or not a valid model.
        ModelError: it is already quantized, or its opset cannot be converted.
    """
    source, proto = _parsed(model, argument)
    _open_dimensions(proto)
    check_tensors(source, proto)
    kept = KeptWeights() if keep_weights else None
    if kept is not None:
        proto = with_weights_beside(proto, kept)
        give_back_freed()
    proto = _without_functions(source, proto)
    drop_stored_inputs(proto)
    set_file_version(proto)
    _sort_nodes(proto)
    _refuse_quantized(source, proto, ASCEND if allow_quantized else ASCEND | QUANTIZED)
    _check(source, proto)
    check_loops(source, proto)
    _name_nodes(proto)
    if not allow_quantized:
        proto = with_explicit_pool_padding(with_opset(proto, usual_opset(proto)))
        remove_identities(proto)
        _name_nodes(proto)
    check_sizes(source, _declare_shapes(proto))
    name = Path(model).stem if isinstance(model, (str, os.PathLike)) else proto.graph.name or "model"
    return SourceModel(name=name, model=proto, kept=kept)


def _parsed(model: AnyModel, argument: str) -> tuple[str, ModelProto]:
    """The model's name in messages, and a copy of the model with all its data."""
    proto, source, folder, file = ModelProto(), argument, None, Snapshot()
    if isinstance(model, ModelProto):
        proto.CopyFrom(model)
        check_texts(proto, source)
    elif isinstance(model, (bytes, bytearray)):
        proto = decode_model(bytes(model), source)
    elif isinstance(model, (str, os.PathLike)):
        source, folder, file = f'"{os.fspath(model)}"', Path(model).parent, Snapshot(model)
        proto = decode_model(read_bytes(model), source)
    else:
        raise ArgumentTypeError(
            f"{argument}: expected the path of an ONNX file, its bytes or a ModelProto, got {type(model).__name__}"
        )
    if not proto.graph.node:
        raise ParseError(f"{source} is not an ONNX model: it has no nodes")
    load_external(source, proto, folder)
    file.check_unchanged()
    return source, proto


# -- normalization -----------------------------------------------------------------------------------------------------


def _without_functions(source: str, proto: ModelProto) -> ModelProto:
    if not proto.functions:
        return proto
    check_function_sizes(source, proto)
    try:
        return inliner.inline_local_functions(proto)
    except Exception as error:
        raise ParseError(f"{source}: its functions cannot be expanded: {first_line(error)}") from error


def _sort_nodes(proto: ModelProto) -> None:
    """Put nodes behind those whose results they read, as ONNX asks; some programs write them in another order.

    Nodes whose place cannot be found (a circle, a result of no node) stay at the end, where the check names one.
    """
    made = {name for node in proto.graph.node for name in node.output if name}
    missing = [{name for name in reads(node) if name in made} for node in proto.graph.node]
    readers: dict[str, list[int]] = {}
    for number, names in enumerate(missing):
        for name in names:
            readers.setdefault(name, []).append(number)
    ready = [number for number, names in enumerate(missing) if not names]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for name in proto.graph.node[order[-1]].output:
            for reader in readers.get(name, ()):
                missing[reader].discard(name)
                if not missing[reader]:
                    heapq.heappush(ready, reader)
            readers.pop(name, None)
    if order == sorted(order):
        return
    placed = set(order)
    order += [number for number in range(len(missing)) if number not in placed]
    nodes = [copied_node(proto.graph.node[number]) for number in order]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _check(source: str, proto: ModelProto) -> None:
    light = light_copy(proto)
    for value in (*light.graph.input, *light.graph.output):
        # The checker requires a shape, runtimes do not; any shape satisfies it.
        value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(light)
    except Exception as error:
        raise ParseError(f"{source} is not a valid ONNX model: {first_line(error)}") from error
    if not proto.graph.input:
        raise ParseError(f"{source} has no inputs, so there is nothing to calibrate with")
    for value in proto.graph.input:
        if value.type.tensor_type.elem_type not in helper.get_all_tensor_dtypes():
            raise ParseError(f'{source} is not a valid ONNX model: input "{value.name}" is no tensor of a known type')


def _refuse_quantized(source: str, proto: ModelProto, refused: frozenset[str]) -> None:
    found = next((node for node in proto.graph.node if node.op_type in refused), None)
    if found is None:
        return
    what = "is already quantized" if refused > ASCEND else "is a deploy file, which only the chip can run"
    advice = "start from the float model" if refused > ASCEND else "use the fake_quant or qdq file"
    raise ModelError(f'{source} {what}: node "{found.name or found.output[0]}" is a {found.op_type}; {advice}')


def _open_dimensions(proto: ModelProto) -> None:
    """Make every dimension of a negative size (-1 in files of some exporters) a dynamic one."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_value < 0:
                dimension.ClearField("dim_value")


def _name_nodes(proto: ModelProto) -> None:
    """Give every node a unique name: its own, or one made of its operator and output."""
    taken: set[str] = set()
    unnamed = []
    for node in proto.graph.node:
        if node.name and node.name not in taken:
            taken.add(node.name)
        else:
            unnamed.append(node)
    for node in unnamed:
        output = next((name for name in node.output if name), "")
        node.name = fresh_name(node.name or f"{node.op_type}_{output}", taken)


def _declare_shapes(proto: ModelProto) -> ModelProto:
    """Add the inferred shapes, and return a light copy that also has those of bodies.

    If inference fails, the model keeps its declarations and is returned itself.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(light_copy(proto))
    except Exception:  # noqa: BLE001  only a help: onnxruntime judges the model
        return proto
    known = {value.name for value in proto.graph.value_info}
    for value in inferred.graph.value_info:
        if value.name not in known:
            proto.graph.value_info.append(value)
    for output, found in zip(proto.graph.output, inferred.graph.output, strict=True):
        if output.type.HasField("tensor_type") and not output.type.tensor_type.HasField("shape"):
            output.type.CopyFrom(found.type)
    return inferred


def input_shape(proto: ModelProto, name: str) -> tuple[int | str | None, ...] | None:
    """The declared shape of an input: sizes, labels of dynamic axes, None where nothing is declared."""
    value = next(value for value in proto.graph.input if value.name == name)
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(_size(dimension) for dimension in value.type.tensor_type.shape.dim)


def _size(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value)
    return str(dimension.dim_param) if dimension.HasField("dim_param") else None


def element_dtype(proto: ModelProto, name: str) -> str:
    """The NumPy name of the element type of an input."""
    value = next(value for value in proto.graph.input if value.name == name)
    return str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


def remove_identities(model: ModelProto) -> None:
    """Remove Identity nodes in place; those that write an output, or what the body of an If, Loop or Scan reads, stay.

    Some exporters write one behind every operator. It would hide what follows a layer: a constant or a batch norm that
    is folded into it, an activation that its quantizer absorbs.
    """
    graph = model.graph
    fixed = {value.name for value in graph.output}.union(*(captures(node) for node in graph.node))
    source: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if node.op_type == "Identity" and not node.domain and node.output[0] not in fixed:
            source[node.output[0]] = source.get(node.input[0], node.input[0])
        else:
            kept.append(node)
    if not source:
        return
    for node in kept:
        for index, name in enumerate(node.input):
            if name in source:
                node.input[index] = source[name]
    known = [value for value in graph.value_info if value.name not in source]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.value_info.extend(known)


NEWEST_FILE_VERSION = 10
"""The IR version of the newest supported opset; runtimes reject files with a newer one."""
STORED_ALONE = 4
"""The first IR version in which stored tensors need not be listed as inputs; files of opset 7 and 8 are older."""


def usual_opset(model: ModelProto) -> int:
    """The default opset for exporting a model: its own, or the nearest supported one."""
    return min(max(model_opset(model), OPSETS[0]), OPSETS[-1])


def with_opset(model: ModelProto, opset: int) -> ModelProto:
    """Convert a model to another opset; returns the model itself if it has this opset. Node and tensor names are kept.

    Raises:
        ArgumentError: the opset is outside 16..21.
        ModelError: an operator of the model does not exist in that opset.
    """
    check_opset(opset)
    if model_opset(model) == opset:
        return model
    try:
        converted = version_converter.convert_version(light_copy(model), opset)
    except Exception as error:
        raise ModelError(
            f"the model has opset {model_opset(model)} and cannot be converted to {opset}: {_reason(error)}; "
            f"export it again with an opset of {OPSETS[0]}..{OPSETS[-1]}"
        ) from error
    result = with_weights(converted, model)
    set_file_version(result)
    return result


def _reason(error: Exception) -> str:
    """What the converter says, without the place in its own source and the condition that failed there."""
    return re.sub(r"^\S+:\d+: \w+: Assertion `.*?` failed: ", "", first_line(error))


def set_file_version(model: ModelProto) -> None:
    """Set an IR version that fits the model's opset, that runtimes support, and without stored tensors as inputs."""
    needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(needed, STORED_ALONE, min(model.ir_version, NEWEST_FILE_VERSION))


def with_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """Add the large initializers of the model to its (possibly changed) light copy, in place, and return it."""
    light.graph.initializer.extend(tensor for tensor in model.graph.initializer if is_large(tensor))
    drop_stored_inputs(light)
    return light


def drop_stored_inputs(model: ModelProto) -> None:
    """Remove inputs that are also initializers; old files list weights as optional inputs."""
    stored = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(kept)
