"""Cuts a large model into consecutive parts, of which one is loaded, or run, at a time.

When onnxruntime loads a float model it rearranges the weights of convolutions, for which it holds three copies of them
for a moment. A part is loaded with its own weights only. It ends in front of a node with weights, so that what
onnxruntime fuses with a convolution (activation, addition) stays with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import ModelProto, helper

from amct.export.onnx.messages import any_value, copy_fields, reads, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import NodeProto, ValueInfoProto


def consecutive_parts(model: ModelProto, most: int) -> list[list[NodeProto]]:
    """The nodes of a model in parts, in their order: each has weights of at most ``most`` bytes, or one node with more.

    A model with sequences is one part.

    Args:
        model: The model; its nodes are in an order in which they can be computed, as ONNX requires.
        most: Bytes.
    """
    sizes = {tensor.name: stored_bytes(tensor) for tensor in model.graph.initializer}
    if _has_other_values(model):
        return [list(model.graph.node)]
    parts: list[list[NodeProto]] = [[]]
    held = 0
    for node in model.graph.node:
        own = sum(sizes.get(name, 0) for name in reads(node))
        if own and held and held + own > most:
            parts.append([])
            held = 0
        parts[-1].append(node)
        held += own
    return parts


def parts_before(model: ModelProto, outputs: Collection[str]) -> list[list[NodeProto]]:
    """The nodes of a model in parts, in their order: a part ends in front of each node with one of these outputs.

    A model with sequences is one part.
    """
    parts: list[list[NodeProto]] = [[]]
    whole = _has_other_values(model)
    for node in model.graph.node:
        if parts[-1] and not whole and not set(outputs).isdisjoint(node.output):
            parts.append([])
        parts[-1].append(node)
    return parts


def _has_other_values(model: ModelProto) -> bool:
    """Whether there may be values that are no tensors: only tensors go from one part to the next."""
    return any("Sequence" in node.op_type or "Optional" in node.op_type for node in model.graph.node)


def part_model(
    model: ModelProto,
    parts: Sequence[Sequence[NodeProto]],
    index: int,
    given: Mapping[str, NDArray[Any]],
    watched: Collection[str] = (),
    *,
    any_size: bool = False,
) -> ModelProto:
    """One part as a model: its outputs are the tensors that later parts read, and outputs of the whole model.

    Args:
        model: The whole model.
        parts: Its parts.
        index: Which one.
        given: The inputs of the whole model and the outputs of earlier parts, as arrays.
        watched: Tensors that are outputs too.
        any_size: Whether the part takes arrays of other sizes than those given.
    """
    nodes = parts[index]
    made = {name for node in nodes for name in node.output if name}
    read = {name for node in nodes for name in reads(node) if name}
    wanted = {name for later in parts[index + 1 :] for node in later for name in reads(node)}
    wanted.update(watched, (value.name for value in model.graph.output))
    part = ModelProto()
    copy_fields(model, part, skip={"graph"})
    part.graph.name = model.graph.name
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    part.graph.input.extend(_declared(name, given[name], any_size) for name in sorted(read & given.keys()))
    part.graph.output.extend(any_value(name) for name in sorted(made & wanted))
    return part


def _declared(name: str, array: NDArray[Any], any_size: bool) -> ValueInfoProto:
    shape: list[int | None] = [None] * array.ndim if any_size else list(array.shape)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)
