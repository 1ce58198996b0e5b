"""Placement ``auto``: the fastest of ``fast``, ``exact`` and float for each region of a model, timed on this machine.

A region is a connected part of the model between tensors that placement ``fast`` leaves float. Regions whose layers
have the same operators and weight shapes, such as the blocks of a transformer, are decided together. Whole files are
timed, because a region also changes the speed of its neighbours. Layers in float are reported with the times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import helper

from amct.errors import ModelError
from amct.export.check.running import LoadedModel, median_seconds
from amct.model import Skip
from amct.model.operators import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.formats import ExportedModel
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import OnnxLayer

    Export = Callable[[frozenset[str], frozenset[str]], ExportedModel]
    """Exports placement ``fast`` with some tensors and some layers left float."""

MOST_GROUPS = 16
"""The largest number of groups of equal regions that are timed; those with the largest weights come first."""
_WORTHWHILE = 0.97
"""A file is faster if it takes at most this share of the time; smaller differences are noise."""
_SEED = 20


@dataclass(frozen=True, kw_only=True)
class Region:
    """Layers that are connected by tensors which placement ``fast`` quantizes, and these tensors."""

    layers: tuple[str, ...]
    tensors: tuple[str, ...]


def fastest_placement(
    graph: OnnxGraph, layers: Sequence[OnnxLayer], model: ModelProto, export: Export
) -> ExportedModel:
    """Export a model with the fastest placement of each region.

    Args:
        graph: the graph of the float model.
        layers: its quantized layers.
        model: the float model.
        export: exports it.
    """
    search = _Search(export, export(frozenset(), frozenset()), _random_inputs(model))
    try:
        search.load()
        quantized = {report.layer for report in search.best.layers}
        candidates = [layer for layer in layers if layer.name in quantized]
        for group in grouped_regions(graph, candidates, search.best.tensors)[:MOST_GROUPS]:
            search.decide(group)
    except ModelError as error:
        return replace(search.best, notes=(*search.best.notes, f'{error}: placement "fast" instead of "auto"'))
    return search.result()


class _Search:
    """The fastest file so far, changed group by group."""

    def __init__(self, export: Export, first: ExportedModel, inputs: Mapping[str, NDArray[Any]]) -> None:
        self._export = export
        self._inputs = inputs
        self._loaded: LoadedModel | None = None
        self._float_tensors: frozenset[str] = frozenset()
        self._float_layers: dict[str, str] = {}
        self._notes: list[str] = []
        self.best = first

    def load(self) -> None:
        """Load and run the first file.

        Raises:
            ModelError: it does not run on the inputs.
        """
        self._loaded = self._running(self.best)

    def decide(self, group: Sequence[Region]) -> None:
        """Choose the fastest placement of equal regions: the present one, ``exact`` or float."""
        tensors = self._float_tensors.union(*(region.tensors for region in group))
        layers = [layer for region in group for layer in region.layers]
        if tensors != self._float_tensors:
            times = self._faster(tensors, frozenset(self._float_layers))
            if times:
                self._float_tensors = tensors
                self._notes.append(f'placement "exact" for {", ".join(layers)}: {times}')
        times = self._faster(self._float_tensors, frozenset({*self._float_layers, *layers}))
        if times:
            self._float_layers.update(dict.fromkeys(layers, times))

    def result(self) -> ExportedModel:
        """The fastest file, with the reason for each layer that it leaves float."""
        skipped = [skip for skip in self.best.skipped if skip.layer not in self._float_layers]
        skipped += [
            Skip(layer, f'placement "auto" leaves it float, because the QDQ file is faster then: {times}')
            for layer, times in self._float_layers.items()
        ]
        return replace(self.best, skipped=tuple(skipped), notes=(*self.best.notes, *self._notes))

    def _faster(self, float_tensors: frozenset[str], float_layers: frozenset[str]) -> str:
        """Adopt another file if it is faster; returns the times as text, or an empty text."""
        assert self._loaded is not None
        other = self._export(float_tensors, float_layers)
        present, loaded = self._loaded, self._running(other)
        times = median_seconds(
            {"present": lambda: present.run(self._inputs), "other": lambda: loaded.run(self._inputs)}
        )
        if times["other"] > _WORTHWHILE * times["present"]:
            return ""
        self.best, self._loaded = other, loaded
        return f"{times['other'] * 1e3:.3g} ms instead of {times['present'] * 1e3:.3g} ms"

    def _running(self, exported: ExportedModel) -> LoadedModel:
        loaded = LoadedModel(exported.model)
        loaded.run(self._inputs)  # the first run allocates memory
        return loaded


def grouped_regions(graph: OnnxGraph, layers: Sequence[OnnxLayer], quantized: Sequence[str]) -> list[list[Region]]:
    """The regions of a model in groups of equal ones, those with the largest weights first.

    Args:
        graph: the graph of the float model.
        layers: the layers that the QDQ file quantizes.
        quantized: the tensors that it quantizes.
    """
    leaders: dict[str, str] = {}

    def leader(name: str) -> str:
        while leaders.setdefault(name, name) != name:
            name = leaders[name]
        return name

    for tensor in quantized:
        producer = graph.producer(tensor)
        if producer is not None and producer.op_type in ACTIVATIONS:  # absorbed by the quantizer of its output
            producer = graph.producer(producer.input[0])
        for node in (*graph.consumers(tensor), *([producer] if producer is not None else [])):
            leaders[leader(node.name)] = leader(f"tensor {tensor}")
    members: dict[str, list[OnnxLayer]] = {}
    for layer in layers:
        members.setdefault(leader(layer.node.name), []).append(layer)
    groups: dict[object, list[Region]] = {}
    sizes: dict[object, int] = {}
    for name, own in members.items():
        tensors = tuple(tensor for tensor in quantized if leader(f"tensor {tensor}") == name)
        key = tuple(sorted((layer.node.op_type, () if layer.weight is None else layer.weight.shape) for layer in own))
        groups.setdefault(key, []).append(Region(layers=tuple(layer.name for layer in own), tensors=tensors))
        sizes[key] = sizes.get(key, 0) + sum(layer.weight.size for layer in own if layer.weight is not None)
    return [groups[key] for key in sorted(groups, key=lambda key: -sizes[key])]


def _random_inputs(model: ModelProto) -> dict[str, NDArray[Any]]:
    """Inputs of the declared shapes, for timing; an unknown size counts as 1."""
    random = np.random.default_rng(_SEED)
    stored = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, NDArray[Any]] = {}
    for value in model.graph.input:
        if value.name not in stored:
            declared = value.type.tensor_type
            shape = [max(dim.dim_value, 1) for dim in declared.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(declared.elem_type)
            values = random.standard_normal(shape) if np.issubdtype(dtype, np.floating) else np.zeros(shape)
            found[value.name] = np.asarray(values, dtype=dtype)
    return found
