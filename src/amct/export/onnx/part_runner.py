"""Runs a large ONNX model in parts, and shows the watched tensors of each part before the next one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.export.onnx.light import light_copy
from amct.export.onnx.messages import reads, tensor_array
from amct.export.onnx.parts import part_model, parts_before
from amct.export.onnx.run_watch import longest_run
from amct.export.onnx.runtime import NO_SPINNING, open_session, run_watched
from amct.export.onnx.sizes import check_sizes_of_run

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import onnxruntime
    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.onnx.kept_weights import KeptWeights


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
