"""Runs a float net and its quantized one side by side and compares what their layers make.

A written net says itself what was quantized: each Quant layer names its layer and holds the factors of one input. A
blob that stands in both nets means the same in both, since quantization lets a layer keep the name of what it makes,
and a layer that takes in others the name of what the last of them made.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from amct import progress
from amct.arguments import input_file
from amct.caffe.engine.net import Net
from amct.caffe.model import read_model, read_test_net
from amct.caffe.running import batches_of, build_net, run_net, samples_of
from amct.errors import ArgumentTypeError, ModelError
from amct.record import DataFactors
from amct.report.activations import InputStatistics
from amct.report.beside import file_beside, read_notes
from amct.report.measuring import Measuring

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.caffe.running import BatchInputs
    from amct.report.measuring import Measured, Metric

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
FilePair = tuple[AnyPath, AnyPath]
"""A prototxt and its caffemodel."""


class Side(Protocol):
    """One of the two nets: its message of the TEST phase, and how it is built."""

    message: ProtoMessage

    def build(self, keep_blobs: Iterable[str]) -> Net:
        """The net; only the named blobs, inputs and outputs stay readable."""


class ModelSide:
    """A model in memory."""

    def __init__(self, model: CaffeModel) -> None:
        self.message = model.net
        self._model = model

    def build(self, keep_blobs: Iterable[str]) -> Net:
        """As ``Side``."""
        return build_net(self._model, keep_blobs=keep_blobs)


class QuantizedFiles:
    """The fake-quant or deploy model that quantization wrote."""

    def __init__(self, model_file: Path, weights_file: Path) -> None:
        self.model_file = model_file
        self.message = read_test_net(model_file)
        self._weights_file = weights_file

    def build(self, keep_blobs: Iterable[str]) -> Net:
        """As ``Side``."""
        net = Net(self.message, keep_blobs=keep_blobs, with_gradients=False)
        net.load_weights(self._weights_file)
        return net

    def real_weights(self) -> dict[str, list[torch.Tensor]]:
        """The blobs of the layers that hold real numbers; a deploy model's hold integers."""
        blobs = {layer.name: [blob.tensor for blob in layer.blobs] for layer in self.build(()).layers}
        return {name: found for name, found in blobs.items() if found and found[0].is_floating_point()}


def float_side(pair: object, argument: str = "float_model") -> ModelSide:
    """The float model in a pair of files.

    Raises:
        ArgumentTypeError: it is no pair.
        FileError, ParseError, ModelError: the files are not what they should be.
    """
    return ModelSide(read_model(*_files(pair, argument)))


def quantized_files(pair: object, argument: str = "quantized_model") -> QuantizedFiles:
    """The quantized model in a pair of files; errors as ``float_side``."""
    return QuantizedFiles(*_files(pair, argument))


def both_sides(float_model: object, quantized_model: object) -> tuple[ModelSide, QuantizedFiles]:
    """Two pairs of files; a warning where their blobs cannot be alike. Errors as ``float_side``."""
    reference, quantized = float_side(float_model), quantized_files(quantized_model)
    changed = read_notes(quantized.model_file).listed("equalized")
    equalized = file_beside(quantized.model_file, "equalized_model.prototxt")
    given, _ = _files(float_model, "float_model")
    if changed and given.name != equalized.name:
        logger.warning(
            "%s was equalized before: the channels of %d layers have other sizes than in %s. To compare layers, give "
            "%s and its caffemodel as the float model",
            quantized.model_file.name,
            len(changed),
            given.name,
            equalized,
        )
    return reference, quantized


def _files(pair: object, argument: str) -> tuple[Path, Path]:
    paths = list(pair) if isinstance(pair, (tuple, list)) else []
    if len(paths) != 2 or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ArgumentTypeError(
            f"{argument}: expected a pair of files (prototxt, caffemodel), got {type(pair).__name__}"
        )
    return input_file(paths[0], argument), input_file(paths[1], argument)


# ------------------------------------------------------------------ what is watched


@dataclass(frozen=True, kw_only=True)
class WatchedInput:
    """A quantized input: the blob, as float nets have it too, and its factors."""

    blob: str
    factors: DataFactors

    def statistics(self) -> InputStatistics:
        """Of its values against its grid."""
        assert self.factors.scale is not None
        return InputStatistics(self.factors.scale, self.factors.offset or 0, self.factors.bits)


@dataclass(frozen=True, kw_only=True)
class WatchedLayer:
    """A quantized layer: its inputs, and the blobs with its results."""

    name: str
    type: str
    inputs: tuple[WatchedInput, ...]
    outputs: tuple[str, ...]

    def key(self, index: int) -> str:
        """Under which the statistics of one input are found."""
        return f"{self.name}:{index}"


def watched_layers(net: ProtoMessage) -> list[WatchedLayer]:
    """The quantized layers of a fake-quant or deploy net, in order.

    Raises:
        ModelError: there is none: the net is not quantized.
    """
    inputs: dict[str, list[WatchedInput]] = {}
    outputs: dict[str, list[str]] = {}
    for layer in net.layer:
        if layer.type == "Quant":
            given = layer.quant_param
            factors = DataFactors(
                index=given.index, scale=given.scale, offset=given.offset, num_bits=given.num_bits_d or None
            )
            inputs.setdefault(given.object_layer, []).append(WatchedInput(blob=layer.bottom[0], factors=factors))
        elif layer.type == "DeQuant":
            outputs.setdefault(layer.dequant_param.object_layer, []).append(layer.top[0])
        elif layer.type == "AntiQuant":
            outputs.setdefault(layer.antiquant_param.object_layer, []).append(layer.top[0])
    found = [
        WatchedLayer(
            name=layer.name,
            type=layer.type.removesuffix("Quant"),  # LSTMQuant is the LSTM of a fake-quant model
            inputs=tuple(sorted(inputs[layer.name], key=lambda each: each.factors.index)),
            outputs=tuple(outputs.get(layer.name, layer.top)),
        )
        for layer in net.layer
        if layer.name in inputs
    ]
    if not found:
        raise ModelError(
            "quantized_model: the net has no Quant layer, so nothing in it is quantized; give the fake-quant or the "
            "deploy model"
        )
    return found


# ------------------------------------------------------------------ the runs


def measure(
    reference: Side,
    quantized: Side,
    data: object,
    *,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    with_inputs: bool = True,
) -> Measured:
    """Run both nets on data; one batch at a time is in memory, and what is kept does not grow with the data.

    Args:
        reference: The float net.
        quantized: The fake-quant or deploy net.
        data: Batches.
        metric: ``metric(outputs, batch)``, the outputs as a dict of arrays.
        inputs: Makes of a batch what the net takes, where its form does not tell.
        with_inputs: Whether the inputs of the layers are summed up, too.

    Raises:
        ModelError: they are not the same net.
        ArgumentError: a batch does not have the net's inputs.
        CalibrationError: there is no data.
    """
    layers = watched_layers(quantized.message)
    watched = list(_common_blobs(reference.message, layers))
    nets = reference.build(watched), quantized.build([blob for layer in layers for blob in layer.outputs])
    statistics = {
        layer.key(index): each.statistics()
        for layer in layers
        for index, each in enumerate(layer.inputs if with_inputs else ())
    }
    measuring = Measuring(statistics, metric)
    told: set[str] = set()
    for batch in progress.track(batches_of(data), "Comparing"):
        expected, got = (run_net(net, batch, inputs) for net in nets)
        for layer in layers:
            for blob in layer.outputs:
                for pair in _partners(nets, blob, f'the output of layer "{layer.name}"', told):
                    measuring.layers.add(layer.name, *pair)
            for index, each in enumerate(layer.inputs if with_inputs else ()):
                statistics[layer.key(index)].add(nets[0].blob(each.blob).tensor)
        measuring.add(_outputs(nets, told))
        measuring.score(expected, got, batch, samples_of(nets[0]))
    measured = measuring.result()
    if not measured.layers:
        raise ModelError("float_model and quantized_model are not the same net: no layer makes outputs of one shape")
    return measured


def _common_blobs(reference: ProtoMessage, layers: list[WatchedLayer]) -> Iterator[str]:
    """The blobs that are looked at in the float net."""
    there = {blob for layer in reference.layer for blob in (*layer.bottom, *layer.top)} | set(reference.input)
    for layer in layers:
        for blob in (*layer.outputs, *(each.blob for each in layer.inputs)):
            if blob not in there:
                raise ModelError(
                    f'float_model and quantized_model are not the same net: layer "{layer.name}" of the quantized one '
                    f'works on blob "{blob}", which the float one does not have'
                )
            yield blob


def _partners(
    nets: tuple[Net, Net], blob: str, what: str, told: set[str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A blob in both nets, if it has one shape there.

    Behind a layer that chooses boxes their number may differ: then no value has its partner, which is told once.
    """
    expected, got = (net.blob(blob).tensor for net in nets)
    if expected.shape == got.shape:
        yield expected, got
    elif blob not in told:
        told.add(blob)
        shapes = list(expected.shape), list(got.shape)
        logger.warning("%s has different shapes in both nets, %s and %s; such batches are not compared", what, *shapes)


def _outputs(nets: tuple[Net, Net], told: set[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    graph, others = nets[0].graph, nets[1].graph
    both = {others.blob_names[index] for index in others.outputs}
    for name in (graph.blob_names[index] for index in graph.outputs):
        if name in both:
            for expected, got in _partners(nets, name, f'output "{name}"', told):
                yield name, expected, got
