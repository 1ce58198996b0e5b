"""Repairs a fast QDQ file that is worse than the simulation: some of the tensors between its layers stay float.

Each of these tensors is rounded alone in the float model, which tells what it adds to the noise of the outputs. Its
cost is the time that is lost if it stays float, estimated from the sizes of tensors and weights: no clock decides,
so that the same model and data give the same file. The noises of different tensors add up nearly, so those that save
most noise for their cost stay float until the sum should be small enough; then the file is exported and measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, numpy_helper

from amct.export.check.batch import batch_size, first_samples
from amct.export.check.losses import FEWEST_SAMPLES
from amct.export.check.running import LoadedModel
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.kept_weights import light_copy
from amct.export.onnx.messages import any_value, attribute_value, sizes_of_run
from amct.export.onnx.runtime import NO_SPINNING, longest_run, open_session, run_watched, with_outputs
from amct.model.operators import ACTIVATIONS, VALUE_PICKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.check.losses import ComparedBatch
    from amct.export.formats import ExportedModel, ExportReport

    Tensors = Mapping[str, NDArray[Any]]

GOAL = 0.5
"""Decibels below the simulation at which a file needs no further repair."""
MOST_COST = 0.3
"""The largest share of the time saved by integers that a repair may give up."""
GOOD_COST = 0.2
"""The same for a file with the verdict Good: it is quantized for its speed."""
CHEAP = 0.1
"""The same for a file that is nearly as good as 8-bit outputs can be."""
TINY_WORK = 3e7
"""Multiplications of a model that runs in a few tenths of a millisecond: it is not quantized for its speed.

If its file is not Good, a repair may cost what it will.
"""
MOST_EXPORTS = 3
"""How often a file is exported and measured."""
MOST_PROBED = 3e11
"""The largest number of multiplications of all probes: some seconds."""
_SAVED = 0.5
"""The share of the time of a float layer that integers save, roughly."""
_PASS = 80
"""The multiplications of a layer that take as long as one number that an elementwise operator reads or writes.

A float tensor between integer layers is also brought to another layout and back by onnxruntime.
"""
_FLOAT_BYTES = 4


def relative_noise(pairs: Iterable[tuple[Tensors, Tensors]], names: Collection[str]) -> float:
    """The power of the noise of several batches relative to that of the signal, summed over the outputs."""
    noise, signal = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for expected, got in pairs:
        for name in names:
            exact, other = expected[name], got.get(name)
            if other is not None and other.shape == exact.shape:
                finite = np.isfinite(exact)
                signal[name] += float(np.sum(np.square(exact[finite], dtype=np.float64)))
                noise[name] += float(np.sum(np.square(other[finite].astype(np.float64) - exact[finite])))
    return sum(noise[name] / signal[name] for name in names if signal[name] > 0)


# -- the tensors, and what they cost -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The values that the integers of a tensor can represent."""

    scale: float
    zero_point: int

    def error(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """What rounding adds to the values."""
        scale = np.float32(self.scale)
        integers = np.clip(np.rint(values / scale) + self.zero_point, 0, 255)
        return np.asarray((integers - self.zero_point) * scale - values, dtype=np.float32)


def grids(file: ModelProto, names: Collection[str]) -> dict[str, Grid]:
    """How a file rounds tensors of the float model."""
    stored = {tensor.name: tensor for tensor in file.graph.initializer}
    found = {}
    for name in names:
        parameters = [stored[each] for each in (f"{name}.scale", f"{name}.zero_point") if each in stored]
        if len(parameters) == 2 and not any(each.HasField("data_location") for each in parameters):
            scale, zero_point = (numpy_helper.to_array(each).reshape(-1) for each in parameters)
            if zero_point.dtype == np.uint8:
                found[name] = Grid(float(scale[0]), int(zero_point[0]))
    return found


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tensor that may stay float, together with those that hold the same values, moved.

    Attributes:
        tensors: Their names.
        noisy: Those that others than layers read: layers round their input anyway.
        cost: The time that is lost with them, in multiplications.
    """

    tensors: tuple[str, ...]
    noisy: tuple[str, ...]
    cost: float


class FloatGraph:
    """The float model, and how a file rounds its tensors.

    Args:
        model: The float model.
        file: The QDQ file.
        report: What its exporter did.
        shapes: The shapes of the inputs.
    """

    def __init__(
        self, model: ModelProto, file: ModelProto, report: ExportReport, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.graph = OnnxGraph(model)
        self.grids = grids(file, report.tensors)
        self._layers = {name for layer in report.layers for name in (layer.node, layer.layer)}
        sizes = sizes_of_run(light_copy(model), shapes)
        self._numbers = {name: size / _FLOAT_BYTES for name, size in sizes.items()}

    def candidates(self) -> list[Candidate]:
        """What may stay float, in the order of the graph."""
        members: dict[str, list[str]] = {}
        inputs = [value.name for value in self.graph.inputs]
        for name in (*inputs, *(name for node in self.graph.nodes for name in node.output)):
            if name in self.grids:
                members.setdefault(self._origin(name), []).append(name)
        found = []
        for tensors in members.values():
            noisy = tuple(name for name in tensors if self.readers(name) or self._is_computed_output(name))
            if noisy:
                cost = sum(map(self._cost, tensors))
                found.append(Candidate(tensors=tuple(tensors), noisy=noisy, cost=cost))
        return found

    def _is_computed_output(self, tensor: str) -> bool:
        return self.graph.is_output(tensor) and self.graph.producer(tensor) is not None

    def readers(self, tensor: str) -> list[NodeProto]:
        """The nodes that would read other values if the tensor were float: no layers, nothing that moves integers."""
        return [
            node
            for node in self.graph.consumers(tensor)
            if node.name not in self._layers and not self._moves(node, self.grids[tensor])
        ]

    def saved(self) -> float:
        """The multiplications whose time the file saves."""
        return _SAVED * sum(self._products(node) for node in self.graph.nodes if node.name in self._layers)

    def work(self) -> float:
        """The multiplications of one run of the float model, with the time of all else in these."""
        return sum(self._products(node) for node in self.graph.nodes) + _PASS * sum(self._numbers.values())

    def _origin(self, tensor: str) -> str:
        node = self.graph.producer(tensor)
        while node is not None and self._moves(node, self.grids.get(node.input[0] if node.input else "")):
            tensor = node.input[0]
            node = self.graph.producer(tensor)
        return tensor

    def _moves(self, node: NodeProto, grid: Grid | None) -> bool:
        return node.op_type in VALUE_PICKING and grid is not None and self.grids.get(node.output[0]) == grid

    def _cost(self, tensor: str) -> float:
        node = self.graph.producer(tensor)
        if node is not None and node.op_type in ACTIVATIONS:
            node = self.graph.producer(node.input[0])
        written = 2 * self._numbers.get(tensor, 0.0)  # and rounded, for the layers that read it
        if node is None or node.op_type in VALUE_PICKING:
            return _PASS * written
        if node.op_type == "Conv":
            return _PASS * written + _SAVED * self._products(node)
        return _PASS * (written + sum(self._numbers.get(name, 0.0) for name in node.input))

    def _products(self, node: NodeProto) -> float:
        """The multiplications of a weighted operator; 0 for every other node."""
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            return 0.0
        weight = self.graph.constant(node.input[1]) if self.graph.is_constant(node.input[1]) else None
        if weight is None:
            return 0.0
        axes = slice(1, None) if node.op_type == "Conv" or attribute_value(node, "transB", 0) else slice(-2, -1)
        return self._numbers.get(node.output[0], 0.0) * math.prod(weight.shape[axes])


# -- their noise -------------------------------------------------------------------------------------------------------


class Probe:
    """The float model with errors added to some tensors: zero, unless they are given.

    Args:
        floats: The float model.
        tensors: The tensors.
    """

    def __init__(self, floats: FloatGraph, tensors: Sequence[str]) -> None:
        graph = floats.graph
        self._errors: dict[str, str] = {}
        self._names: dict[str, str] = {}
        inputs = {value.name for value in graph.inputs}
        self._fed = [tensor for tensor in tensors if tensor in inputs]
        for tensor in tensors:
            self._errors[tensor] = graph.add_initializer(f"{tensor}.error", np.zeros((), np.float32))
            name = self._insert(graph, tensor, floats.readers(tensor))
            if tensor not in inputs:
                self._names[tensor] = name
        model = graph.build()
        for name in self._errors.values():
            value = any_value(name)
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            model.graph.input.append(value)  # an input with a value of its own need not be given
        self._outputs = [value.name for value in model.graph.output]
        self._seconds = longest_run(model)
        self._session = open_session(with_outputs(model, self._names.values()), NO_SPINNING, threads=1, lean=True)

    def _insert(self, graph: OnnxGraph, tensor: str, readers: Sequence[NodeProto]) -> str:
        """Let these nodes, and the graph output, read the sum; returns the name of the tensor without error."""
        others = [node for node in graph.consumers(tensor) if all(node is not each for each in readers)]
        if graph.is_output(tensor) and graph.producer(tensor) is not None:
            source, result = graph.tap(tensor, tensor)
            graph.add_node("Add", graph.fresh_name(f"{tensor}.with_error"), [source, self._errors[tensor]], [result])
            for node in others:
                _replace(graph, node, result, source)
            return source
        result = graph.add_node("Add", graph.fresh_name(f"{tensor}.with_error"), [tensor, self._errors[tensor]])
        for node in readers:
            _replace(graph, node, tensor, result)
        return tensor

    def values(self, feeds: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs and the tensors, by their names."""
        found = run_watched(self._session, [*self._outputs, *self._names.values()], feeds, self._seconds)
        values = {tensor: found[name] for tensor, name in self._names.items()}
        return found, {**values, **{tensor: feeds[tensor] for tensor in self._fed}}

    def outputs(self, feeds: Tensors, errors: Tensors) -> Tensors:
        """The outputs with these errors."""
        given = {self._errors[tensor]: error for tensor, error in errors.items()}
        return run_watched(self._session, self._outputs, {**feeds, **given}, self._seconds)


def _replace(graph: OnnxGraph, node: NodeProto, tensor: str, by: str) -> None:
    for index, name in enumerate(node.input):
        if name == tensor:
            graph.set_input(node, index, by)


# -- the repair --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What a candidate does.

    Attributes:
        candidate: The tensors.
        noise: What rounding them adds to the outputs, as ``relative_noise``.
    """

    candidate: Candidate
    noise: float

    @property
    def worth(self) -> float:
        """The noise that is saved for the time that is lost."""
        return self.noise / max(self.candidate.cost, 1.0)


class Repair:
    """Finds tensors that had better stay float.

    Args:
        model: The float model.
        export: Exports the file without quantizing the given tensors.
        batches: The batches, with the outputs of the float model and of the simulation.
        outputs: The outputs that count.
    """

    def __init__(
        self,
        model: ModelProto,
        export: Callable[[Collection[str]], ExportedModel],
        batches: Sequence[ComparedBatch],
        outputs: Collection[str],
    ) -> None:
        self._model, self._export, self._batches, self._outputs = model, export, batches, outputs

    def run(
        self, file: ModelProto, report: ExportReport, got: Sequence[Tensors], share: float = MOST_COST
    ) -> tuple[ExportedModel, tuple[str, ...]] | None:
        """The repaired file and the tensors that stay float in it; None if that is worth too little.

        Args:
            file: The file.
            report: What its exporter did.
            got: Its outputs, batch by batch.
            share: The largest share of the time saved by integers that may be given up; infinite: a file that is of no
                use may become slower than the float model.
        """
        exact = [batch.expected for batch in self._batches]
        simulated = [batch.simulated for batch in self._batches]
        least = relative_noise(zip(exact, simulated, strict=True), self._outputs)
        before = relative_noise(zip(exact, got, strict=True), self._outputs)
        wanted = least * 10 ** (GOAL / 10)
        feeds = [_few(self._model, batch.inputs) for batch in self._batches]
        floats = FloatGraph(self._model, file, report, {name: array.shape for name, array in feeds[0].items()})
        is_tiny = share > GOOD_COST and floats.work() < TINY_WORK * batch_size(feeds[0])[0]
        most = math.inf if is_tiny else share * max(floats.saved(), 1.0)
        damages = self._damages(floats, [each for each in floats.candidates() if each.cost <= most], feeds)
        best: ExportedModel | None = None
        reached, chosen = before, tuple[str, ...]()
        allowed = wanted - least
        for _ in range(MOST_EXPORTS):
            tensors = cheapest(damages, allowed, most)
            if len(tensors) <= len(chosen):
                break
            exported = self._export(set(tensors))
            noise = self._noise(exported)
            if noise < reached:
                best, reached, chosen = exported, noise, tensors
            if noise <= wanted:
                break
            allowed /= 4
        worthwhile = math.sqrt(before * least) if math.isinf(share) else before * 10 ** (-GOAL / 10)
        return (best, chosen) if best is not None and reached <= worthwhile else None

    def _damages(self, floats: FloatGraph, candidates: Sequence[Candidate], batches: Sequence[Tensors]) -> list[Damage]:
        """The noise of each candidate alone, the one that is most worth its cost first."""
        work = floats.work()
        batches = batches[: max(1, int(MOST_PROBED / (work * (len(candidates) + 1) + 1)))]
        candidates = sorted(candidates, key=lambda each: each.cost)[: max(1, int(MOST_PROBED / (work + 1)))]
        known = floats.grids
        probe = Probe(floats, [name for each in candidates for name in each.noisy])
        noises = [0.0] * len(candidates)
        for feeds in batches:
            exact, values = probe.values(feeds)
            for index, each in enumerate(candidates):
                errors = {name: known[name].error(values[name]) for name in each.noisy}
                noises[index] += relative_noise([(exact, probe.outputs(feeds, errors))], self._outputs) / len(batches)
        found = [Damage(candidate=each, noise=noise) for each, noise in zip(candidates, noises, strict=True)]
        return sorted((each for each in found if each.noise > 0), key=lambda each: -each.worth)

    def _noise(self, exported: ExportedModel) -> float:
        loaded = LoadedModel(exported.model, lean=True)
        pairs = ((batch.expected, loaded.run(batch.inputs)) for batch in self._batches)
        return relative_noise(pairs, self._outputs)


def cheapest(damages: Sequence[Damage], allowed: float, most: float) -> tuple[str, ...]:
    """The tensors that stay float, so that the others make no more noise than allowed, as far as the cost goes."""
    left, cost = sum(each.noise for each in damages), 0.0
    chosen: list[str] = []
    for each in damages:
        if left <= allowed:
            break
        if cost + each.candidate.cost <= most:
            chosen += each.candidate.tensors
            left -= each.noise
            cost += each.candidate.cost
    return tuple(chosen)


def _few(model: ModelProto, inputs: Tensors) -> Tensors:
    """The first samples of a batch, if the model takes any number of them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    sizes = [value.type.tensor_type.shape.dim for value in model.graph.input if value.name not in stored]
    is_open = all(dims and not dims[0].HasField("dim_value") for dims in sizes)
    few: Tensors = first_samples(dict(inputs), most=FEWEST_SAMPLES) if is_open else inputs
    return few
