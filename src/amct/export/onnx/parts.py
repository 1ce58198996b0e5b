"""Cuts a large model into consecutive parts, of which one is loaded, or run, at a time.

When onnxruntime loads a float model it rearranges the weights of convolutions, for which it holds three copies of them
for a moment. A part is loaded with its own weights only. It ends in front of a node with weights, so that what
onnxruntime fuses with a convolution (activation, addition) stays with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import ModelProto, helper

from amct.export.onnx.kept_weights import copy_fields, light_copy, tensor_array
from amct.export.onnx.messages import any_value, check_sizes_of_run, reads, stored_bytes
from amct.export.onnx.runtime import NO_SPINNING, longest_run, open_session, run_watched

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import onnxruntime
    from numpy.typing import NDArray
    from onnx import NodeProto, ValueInfoProto

    from amct.export.onnx.kept_weights import KeptWeights


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


class PartRunner:
    """A model ready to run; all watched tensors at a time would need as much memory as its weights.

    Args:
        model: Any model that onnxruntime supports; it is not changed.
        kept: The owner of the weights beside it.
        watched: Tensors to show: node outputs, inputs or constants.
        cuts: Outputs of the nodes in front of which a part ends.

    """

    def __init__(self, model: ModelProto, kept: KeptWeights, watched: Iterable[str], cuts: Collection[str]) -> None:
        self._model, self._kept = model, kept
        self._watched = frozenset(watched)
        self._parts = parts_before(model, cuts)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._constants = {name: tensor_array(stored[name]) for name in self._watched & stored.keys()}
        self._seconds = longest_run(model)
        self._light = light_copy(model)
        self._checked_shapes: dict[str, tuple[int, ...]] | None = None
        dims = [dim for value in self._light.graph.input for dim in value.type.tensor_type.shape.dim]
        self._any_size = not all(dim.HasField("dim_value") for dim in dims)
        self._sessions: list[tuple[onnxruntime.InferenceSession, list[str]]] = []
        used, self._read_later = set[str](), list[frozenset[str]]()
        for part in reversed(self._parts):
            self._read_later.insert(0, frozenset(used))
            used.update(name for node in part for name in reads(node))

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """The watched tensors by name, those of one part after the other; whoever takes them may free them at once.

        Raises:
            CalibrationError: The model rejects these inputs, or does not end.
            ModelError: It would need too much memory for inputs of these shapes, or a part cannot be loaded.
        """
        self._check_memory(feeds)
        yield {**{name: feeds[name] for name in self._watched & feeds.keys()}, **self._constants}
        values = dict(feeds)
        for index, later in enumerate(self._read_later):
            found = self._results(index, values)
            values = {name: array for name, array in {**values, **found}.items() if name in later}
            shown = {name: found[name] for name in self._watched & found.keys()}
            del found
            yield shown

    def _results(self, index: int, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs of a part; it is loaded when it runs first, because only then the types of its inputs are known.

        Its weights are inputs of the session, which makes no copy of them: all parts stay loaded.
        """
        if index == len(self._sessions):
            part = part_model(self._model, self._parts, index, values, self._watched, any_size=self._any_size)
            session = open_session(part, NO_SPINNING, lean=True, is_large=True)
            self._sessions.append((session, [value.name for value in part.graph.output]))
        session, names = self._sessions[index]
        own = {value.name: values[value.name] for value in session.get_inputs()}
        return run_watched(session, names, own, self._seconds)

    def _check_memory(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Check the sizes of all tensors, once for every shape of the inputs."""
        shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        if shapes != self._checked_shapes:
            check_sizes_of_run("the model", self._light, shapes, sorted(self._watched))
            self._checked_shapes = shapes
