"""Checks an ONNX model that was read from a file, before any other part of this package uses it.

A file may be damaged or hostile: names that are no text, tensors without their data, nodes without inputs, data files
outside its folder, tensors and functions that grow without limit, loops without end.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from amct.atomic import check_whole
from amct.errors import FileError, ModelError, ParseError
from amct.export.onnx.messages import MODEL_LIMIT_VARIABLE, first_line, model_limit, subgraphs
from amct.memory import gibibytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from onnx import FunctionProto, GraphProto, NodeProto

MOST_NODES = 1_000_000
"""The largest number of nodes of a model whose functions are expanded."""
MOST_REPETITIONS = 1_000_000
"""The largest constant number of repetitions of a Loop."""


def decode_model(content: bytes, source: str) -> ModelProto:
    """Parse a model; every name in it is text.

    Raises:
        ParseError: the bytes are no ONNX model, or a name is not UTF-8.
    """
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ParseError(f"{source} is not an ONNX model: it is truncated, or a file of another kind") from error
    check_texts(proto, source)
    return proto


def check_texts(proto: ModelProto, source: str) -> None:
    """Check that every name in a model is text: protobuf returns damaged names as bytes, or fails when they are read.

    Raises:
        ParseError: a name is not UTF-8.
    """
    try:
        wrong = next(_wrong_texts(proto), None)
    except UnicodeDecodeError as error:
        wrong = ("a name", error.object)
    if wrong is not None:
        raise ParseError(
            f"{source} is not a valid ONNX model: {wrong[0]} is not UTF-8 text: {bytes(wrong[1])[:80]!r}. Export the "
            "model again"
        )


def _wrong_texts(message: Message) -> Iterator[tuple[str, bytes]]:
    for field, value in _fields(message):
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in value if hasattr(value, "extend") else (value,):
                if not isinstance(text, str):
                    yield f"{message.DESCRIPTOR.name}.{field.name}", text
        elif field.message_type is not None:
            for inner in value if hasattr(value, "extend") else (value,):
                yield from _wrong_texts(inner)


def _fields(message: Message) -> Sequence[tuple[Any, Any]]:
    """The fields that are set; of a tensor without its data, which listing would copy."""
    if not isinstance(message, TensorProto):
        return message.ListFields()
    descriptors = message.DESCRIPTOR.fields_by_name
    return [(descriptors[name], getattr(message, name)) for name in ("name", "external_data")]


# -- stored tensors ----------------------------------------------------------------------------------------------------


def load_external(source: str, proto: ModelProto, folder: Path | None) -> None:
    """Load the tensors that a model keeps in files beside it; nothing outside its folder is read.

    Raises:
        FileError: a file is outside the folder, or cannot be read.
        ParseError: there is no folder.
    """
    outside = [tensor for tensor in stored_tensors(proto.graph) if tensor.data_location == TensorProto.EXTERNAL]
    if not outside:
        return
    if folder is None:
        raise ParseError(
            f'{source}: tensor "{outside[0].name}" is kept in another file; give the path of the model instead'
        )
    check_whole(*{_location(source, tensor, folder) for tensor in outside})
    _check_external_sizes(source, outside, folder)
    try:
        onnx.load_external_data_for_model(proto, str(folder))
    except Exception as error:
        raise FileError(
            f"{source}: tensors that it keeps in files of their own cannot be read: {first_line(error)}"
        ) from error


def _location(source: str, tensor: TensorProto, folder: Path) -> Path:
    """The file of an external tensor. It must be inside the model's folder, because a model may be untrusted."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        root = folder.resolve()
        place = (root / location).resolve()
        inside = bool(location) and not os.path.isabs(location) and place.is_relative_to(root)  # noqa: PTH117
        exists = inside and place.is_file()
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        raise FileError(f'{source}: tensor "{tensor.name}" is kept in {location!r}: {error}') from error
    if not inside:
        raise FileError(
            f'{source}: tensor "{tensor.name}" is kept in "{location}", outside the folder of the model; '
            "it is not read. Put the file beside the model"
        )
    if not exists:
        raise FileError(f'{source}: tensor "{tensor.name}" is kept in "{location}", which does not exist')
    return place


def _check_external_sizes(source: str, tensors: Iterable[TensorProto], folder: Path) -> None:
    """Check how much will be read before it is read: many tensors may name the same bytes of one file."""
    total = 0
    for tensor in tensors:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        # Without a usable length the rest of the file is read; a negative one would be taken as such, too.
        length = entries.get("length", "")
        total += int(length) if length.isdigit() else _location(source, tensor, folder).stat().st_size
        if total > model_limit():
            raise ModelError(
                f'{source}: with tensor "{tensor.name}" the tensors that it keeps in files of their own need '
                f"{gibibytes(total)}; the limit is {gibibytes(model_limit())}. If this size is intended, set "
                f"{MODEL_LIMIT_VARIABLE} to a larger number of bytes"
            )


def stored_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """All stored tensors: initializers, and attributes of nodes at any depth."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for body in subgraphs(node):
            yield from stored_tensors(body)


def check_tensors(source: str, proto: ModelProto) -> None:
    """Check that the data of every stored tensor matches its shape and type; later readers do not check.

    Raises:
        ParseError: the data of a tensor is damaged.
    """
    for tensor in stored_tensors(proto.graph):
        _check_tensor(source, tensor)


def _check_tensor(source: str, tensor: TensorProto) -> None:
    try:
        if any(size < 0 for size in tensor.dims):
            raise ValueError(f"negative size in shape {list(tensor.dims)}")
        array = numpy_helper.to_array(tensor)
        if array.size != math.prod(tensor.dims):
            raise ValueError(f"{array.size} values for shape {list(tensor.dims)}")
    except Exception as error:
        raise ParseError(f'{source}: the data of tensor "{tensor.name}" is damaged: {first_line(error)}') from error


# -- nodes -------------------------------------------------------------------------------------------------------------


def check_nodes(source: str, proto: ModelProto) -> None:
    """Check the inputs, outputs and attributes of every node whose operator ONNX defines.

    Raises:
        ParseError: a node is damaged.
    """
    context = onnx.checker.C.CheckerContext()
    try:
        context.ir_version = proto.ir_version or onnx.IR_VERSION
        context.opset_imports = {entry.domain: entry.version for entry in proto.opset_import} or {"": 1}
    except TypeError as error:  # a number beyond 32 bits
        raise ParseError(f"{source} is not a valid ONNX model: its version is out of range") from error
    for node in proto.graph.node:
        if not any(node.output):
            raise ParseError(f'{source} is not a valid ONNX model: node "{node.name}" ({node.op_type}) has no output')
        try:
            if onnx.defs.has(node.op_type, node.domain):
                onnx.checker.check_node(_standard(node, context.opset_imports), context)
        except Exception as error:
            raise ParseError(
                f'{source} is not a valid ONNX model: node "{node.name}" ({node.op_type}): {first_line(error)}. '
                "Export the model again"
            ) from error


def _standard(node: NodeProto, opsets: Mapping[str, int]) -> NodeProto:
    """The node without attributes that its operator does not have; AMCT's modified models have some."""
    known = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain).attributes
    if all(attribute.name in known for attribute in node.attribute):
        return node
    plain = helper.make_node(node.op_type, node.input, node.output, name=node.name, domain=node.domain)
    plain.attribute.extend(attribute for attribute in node.attribute if attribute.name in known)
    return plain


class _Count(NamedTuple):
    """The size of a graph whose functions are expanded."""

    nodes: int
    bytes: int


def check_function_sizes(source: str, proto: ModelProto) -> None:
    """Check how large a model becomes when its functions are expanded: each function may call another one twice.

    Raises:
        ModelError: its nodes, with the constants in them, need too much memory.
        ParseError: there are too many nodes, or a function calls itself.
    """
    functions = {(function.domain, function.name): function for function in proto.functions}
    counts: dict[tuple[str, str], _Count] = {}
    for key in functions:
        _count_function(source, key, functions, counts)
    total, size = _count(proto.graph.node, counts)
    if total > MOST_NODES:
        raise ParseError(
            f"{source}: its functions expand to {total} nodes; the limit is {MOST_NODES}. The file is damaged or "
            "hostile; export the model without functions"
        )
    if size > model_limit():
        raise ModelError(
            f"{source}: its functions expand to nodes of {gibibytes(size)}; the limit is {gibibytes(model_limit())}. "
            f"If this size is intended, set {MODEL_LIMIT_VARIABLE} to a larger number of bytes"
        )


def _count_function(
    source: str,
    key: tuple[str, str],
    functions: Mapping[tuple[str, str], FunctionProto],
    counts: dict[tuple[str, str], _Count],
) -> None:
    """Count the nodes of a function and of the functions that it calls; iterative, because chains can be long."""
    waiting, entered = [key], set()
    while waiting:
        current = waiting[-1]
        called = {(node.domain, node.op_type) for node in _all_nodes(functions[current].node)} & functions.keys()
        missing = [each for each in called if each not in counts]
        if missing and current in entered:
            raise ParseError(f'{source}: function "{current[1]}" calls itself, directly or through others')
        entered.add(current)
        if missing:
            waiting += missing
            continue
        counts[waiting.pop()] = _count(functions[current].node, counts)


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes with those of their bodies."""
    for node in nodes:
        yield node
        for body in subgraphs(node):
            yield from _all_nodes(body.node)


def _count(nodes: Iterable[NodeProto], counts: Mapping[tuple[str, str], _Count]) -> _Count:
    total = size = 0
    for node in _all_nodes(nodes):
        called = counts.get((node.domain, node.op_type), _Count(1, 0))
        # The nodes of a body are counted twice, in the body and by its owner: the expanded size is not underestimated.
        total, size = total + called.nodes, size + called.bytes + node.ByteSize()
    return _Count(total, size)


# -- loops -------------------------------------------------------------------------------------------------------------


def check_loops(source: str, proto: ModelProto) -> None:
    """Refuse a Loop that cannot end: its condition is always true, and its number of repetitions has no useful limit.

    Raises:
        ModelError: there is such a Loop.
    """
    for graph in _all_graphs(proto.graph):
        constants = _constants(graph)
        for node in graph.node:
            if node.op_type == "Loop" and _never_ends(node, constants):
                raise ModelError(
                    f'{source}: Loop "{node.name or next(iter(node.output), "")}" never ends: its condition is always '
                    f"true, and it has no number of repetitions up to {MOST_REPETITIONS}"
                )


def _all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _all_graphs(body)


def _never_ends(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    trips, condition = (node.input[index] if len(node.input) > index else "" for index in (0, 1))
    if trips and (trips not in constants or _first_value(constants[trips]) <= MOST_REPETITIONS):
        return False
    if condition and (condition not in constants or not _first_value(constants[condition])):
        return False
    return any(_stays_true(body) for body in subgraphs(node))


def _stays_true(body: GraphProto) -> bool:
    """Whether the first output of a body, the condition, is a constant true or its own condition input."""
    if not body.output or len(body.input) < 2:
        return False
    name = body.output[0].name
    producers = {output: node for node in body.node for output in node.output}
    for _ in range(len(body.node)):
        node = producers.get(name)
        if node is None or node.op_type != "Identity" or not node.input:
            break
        name = node.input[0]
    if name == body.input[1].name:
        return True
    constants = _constants(body)
    return name in constants and bool(_first_value(constants[name]))


def _constants(graph: GraphProto) -> dict[str, TensorProto]:
    """The stored tensors of a graph, also those of its Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            values = [each.t for each in node.attribute if each.name == "value" and each.type == AttributeProto.TENSOR]
            found.update(dict.fromkeys(node.output[:1], values[0]) if values else {})
    return found


def _first_value(tensor: TensorProto) -> int:
    values = numpy_helper.to_array(tensor).reshape(-1)
    return int(values[0]) if values.size else 0
