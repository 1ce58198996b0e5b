"""Why a file is worse than the simulation: the first tensor at which it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.errors import AmctError
from amct.export.check.losses import loss, output_similarity
from amct.export.formats import layer_outputs, rescaled_layers
from amct.export.onnx.kept_weights import light_copy
from amct.export.onnx.messages import reads, sizes_of_run
from amct.export.onnx.runtime import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.check.losses import Similarity
    from amct.export.formats import ExportedModel

    Places = Mapping[str, tuple[str, str, str]]

_SMALLEST_PART = 2**23
"""Bytes of tensors that are always looked at together."""
_MOST_PARTS = 12
"""For each part the models are loaded again."""


def first_difference(
    original: ModelProto,
    simulate: Callable[[], ExportedModel],
    read_file: Callable[[], ModelProto],
    inputs: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, str] | None = None,
    *,
    more_than: float,
) -> str:
    """The first tensor, in execution order, whose SQNR is worse in the file than in the simulation; "" if none is.

    Tensors are looked at in parts: all of a convolutional network would need more memory than its weights. Beside the
    float model and these tensors one of the other models is in memory at a time.

    Args:
        original: The float model.
        simulate: Makes its fake-quant form.
        read_file: Reads the written model; tensors that it shares with the float model have the same name.
        inputs: The batch.
        outputs: By layer: the tensor of the file that holds its output, if the file's metadata does not say it.
        more_than: The loss in decibels that counts: half of that of the file's output, so that the cause is found and
            not a small loss before it.
    """
    file, simulation = light_copy(read_file()), _without_weights(simulate())
    known = layer_outputs(file) if outputs is None else outputs
    places = _common_tensors(original, simulation, file, known)
    sizes = sizes_of_run(light_copy(original), {name: tuple(value.shape) for name, value in inputs.items()})
    for part in _parts(places, sizes):
        try:
            expected = _values(original, part, 0, inputs)
            simulated = _similarities(expected, _values_of_simulation(simulate, part, inputs))
            got = _similarities(expected, _values(read_file(), part, 2, inputs))
        except AmctError:  # a model that runs with its outputs alone may not run with all its tensors
            return ""
        found = next((name for name in part if loss(simulated.get(name), got.get(name)) > more_than), "")
        if found:
            return found
    return ""


def _without_weights(simulation: ExportedModel) -> ExportedModel:
    return replace(simulation, model=light_copy(simulation.model), kept=None)


def _parts(places: Places, sizes: Mapping[str, int]) -> Iterator[Places]:
    """The places in their order, in parts whose tensors need about the same memory."""
    largest = max(_SMALLEST_PART, sum(sizes.get(name, 0) for name in places) // _MOST_PARTS)
    part: dict[str, tuple[str, str, str]] = {}
    held = 0
    for name, tensors in places.items():
        size = sizes.get(name, 0)
        if part and held + size > largest:
            yield part
            part, held = {}, 0
        part[name] = tensors
        held += size
    if part:
        yield part


def _values_of_simulation(
    simulate: Callable[[], ExportedModel], places: Places, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    simulation = simulate()  # it owns the weights of its model
    return _values(simulation.model, places, 1, inputs)


def _values(
    model: ModelProto, places: Places, index: int, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The tensors of one model at the places, by place; without sequences of tensors."""
    found = Runner(model, [tensors[index] for tensors in places.values()], lean=True).run(inputs)
    by_place = {name: found[tensors[index]] for name, tensors in places.items()}
    return {name: value for name, value in by_place.items() if isinstance(value, np.ndarray)}


def _similarities(
    expected: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]
) -> dict[str, Similarity | None]:
    """How near each tensor is; the tensors themselves are not kept."""
    common = expected.keys() & got.keys()
    return {name: output_similarity({name: expected[name]}, {name: got[name]})[0] for name in common}


def _common_tensors(
    original: ModelProto, simulation: ExportedModel, file: ModelProto, file_outputs: Mapping[str, str]
) -> dict[str, tuple[str, str, str]]:
    """The tensors of the float model that hold the same numbers in all three models, with their name in each.

    Inside a layer there may be integers. Behind a layer whose channels the file rescales, tensors are left out up to
    the next layer.
    """
    layer_of = {report.output: report.layer for report in simulation.layers}
    nodes = set(layer_of.values())
    outputs = layer_outputs(simulation.model), file_outputs
    computed = [{name for node in model.graph.node for name in node.output} for model in (simulation.model, file)]
    rescaled, changed = rescaled_layers(file), set[str]()
    found: dict[str, tuple[str, str, str]] = {}
    for node in original.graph.node:
        if node.name in rescaled or (node.name not in nodes and changed.intersection(reads(node))):
            changed.update(node.output)
            continue
        for tensor in filter(None, node.output):
            if node.name in nodes and tensor not in layer_of:
                continue
            own, other = (names.get(layer_of.get(tensor, ""), tensor) for names in outputs)
            if own in computed[0] and other in computed[1]:
                found[tensor] = (tensor, own, other)
    return found
