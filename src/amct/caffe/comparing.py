"""Runs a float net and its quantized net side by side and compares the outputs of their layers.

The Quant layers of a written net describe what was quantized: each names its layer and holds the factors of one input.
A blob that exists in both nets has the same meaning in both: quantization keeps the name of a layer's output, and a
layer into which others are folded takes the output name of the last of them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from amct.arguments import input_file
from amct.atomic import AnyPath
from amct.caffe.engine.layer import moves_values
from amct.caffe.model import caffe_batches, read_model, read_quantized_model, run_net, sample_count
from amct.errors import ArgumentTypeError, ModelError
from amct.model.quant_json import file_beside, notes_beside
from amct.numerics.qparams import QParams
from amct.pipeline.compare import measure
from amct.pipeline.door import ModelOutput
from amct.pipeline.quantized_model import QuantizedModel
from amct.printable import counted
from amct.report.filling import input_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.engine.net import Net
    from amct.caffe.model import Batch, CaffeModel
    from amct.numerics.similarity import LayerComparison
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import OnTensor
    from amct.report.activations import InputStatistics
    from amct.report.measuring import Measured, Metric

logger = logging.getLogger(__name__)

FilePair = tuple[AnyPath, AnyPath]
"""A prototxt and its caffemodel."""


def float_side(pair: object, custom_proto: AnyPath | None = None) -> CaffeModel:
    """The float model in a pair of files; ``custom_proto`` describes messages of the user's own layers.

    Raises:
        ArgumentTypeError: The argument is not a pair of paths.
        FileError, ParseError, ModelError: a file cannot be read or is invalid.
    """
    return read_model(*_files(pair, "float_model"), custom_proto)


def both_sides(
    float_model: object, quantized_model: object, custom_proto: AnyPath | None = None
) -> tuple[CaffeModel, CaffeModel]:
    """Read two pairs of files; warn if their blobs cannot match. Errors as ``float_side``."""
    reference = float_side(float_model, custom_proto)
    prototxt, weights = _files(quantized_model, "quantized_model")
    quantized = read_quantized_model(prototxt, weights, custom_proto)
    changed = notes_beside(prototxt).equalized
    equalized = file_beside(prototxt, "equalized_model.prototxt")
    given, _ = _files(float_model, "float_model")
    if changed and given.name != equalized.name:
        logger.warning(
            "%s was equalized before: the channels of %s have other sizes than in %s. To compare layers, give "
            "%s and its caffemodel as the float model",
            prototxt.name,
            counted(len(changed), "layer"),
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


# ------------------------------------------------------------------ observed layers


@dataclass(frozen=True, kw_only=True)
class WatchedInput:
    """A quantized input: its index among the bottoms, the name of its blob in the float net, and its grid."""

    index: int
    blob: str
    grid: QParams


@dataclass(frozen=True, kw_only=True)
class WatchedLayer:
    """A quantized layer: its inputs and its output blobs."""

    name: str
    type: str
    inputs: tuple[WatchedInput, ...]
    outputs: tuple[str, ...]


def watched_layers(net: ProtoMessage) -> list[WatchedLayer]:
    """The quantized layers of a fake-quant or deploy net, in order."""
    inputs: dict[str, list[WatchedInput]] = {}
    outputs: dict[str, list[str]] = {}
    for layer in net.layer:
        if layer.type == "Quant":
            given = layer.quant_param
            grid = QParams.of(given.scale, given.offset, given.num_bits_d or 8)
            found = WatchedInput(index=given.index, blob=layer.bottom[0], grid=grid)
            inputs.setdefault(given.object_layer, []).append(found)
        elif layer.type == "DeQuant":
            outputs.setdefault(layer.dequant_param.object_layer, []).append(layer.top[0])
        elif layer.type == "AntiQuant":
            outputs.setdefault(layer.antiquant_param.object_layer, []).append(layer.top[0])
    behind = _behind_rectifiers(net)
    return [
        WatchedLayer(
            name=layer.name,
            type=layer.type.removesuffix("Quant"),  # LSTMQuant is the LSTM of a fake-quant model
            inputs=tuple(sorted(inputs[layer.name], key=lambda each: each.index)),
            outputs=tuple(
                behind.get(blob, blob) if moves_values(layer) else blob for blob in outputs.get(layer.name, layer.top)
            ),
        )
        for layer in net.layer
        if layer.name in inputs
    ]


def _behind_rectifiers(net: ProtoMessage) -> dict[str, str]:
    """By blob that only a rectifier reads: the rectifier's result.

    A layer that only moves values (Concat) shares the factors of the layer behind the rectifier: values that the
    rectifier removes are outside its range, and no error.
    """
    readers = Counter(blob for layer in net.layer for blob in layer.bottom)
    rectifiers = (
        layer
        for layer in net.layer
        if layer.type in ("ReLU6", "Clip") or (layer.type == "ReLU" and not layer.relu_param.negative_slope)
    )
    lone = (layer for layer in rectifiers if len(layer.bottom) == len(layer.top) == 1)
    return {layer.bottom[0]: layer.top[0] for layer in lone if readers[layer.bottom[0]] == 1}


# ------------------------------------------------------------------ the runs


class ComparedNet:
    """One of two compared nets; the blobs of its quantized layers are passed to callbacks after each forward."""

    shapes_vary = True  # their number may differ behind a layer that selects boxes

    def __init__(self, side: CaffeModel, layers: Sequence[WatchedLayer]) -> None:
        self._side = side
        self._layers = layers

    @contextmanager
    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> Iterator[Callable[[Batch], ModelOutput]]:
        """A context whose value is a function that runs the net on one batch."""
        watched = self._layers if outputs is not None else ()
        results = [(layer.name, blob) for layer in watched for blob in layer.outputs]
        given = [
            (input_key(layer.name, index), each.blob)
            for layer in self._layers
            for index, each in enumerate(layer.inputs if inputs is not None else ())
        ]
        net = self._side.build([blob for _, blob in (*results, *given)])

        def run(batch: Batch) -> ModelOutput:
            found = _output_of(net, batch)
            for layer, blob in results:
                assert outputs is not None
                outputs(layer, net.blob(blob).tensor)
            for key, blob in given:
                assert inputs is not None
                inputs(key, net.blob(blob).tensor)
            return found

        yield run


def _output_of(net: Net, batch: Batch) -> ModelOutput:
    value = run_net(net, batch)
    return ModelOutput(value=value, tensors=[(name, torch.from_numpy(array)) for name, array in value.items()])


def compared_nets(reference: CaffeModel, quantized: CaffeModel) -> tuple[ComparedNet, ComparedNet]:
    """Both nets, observed at the layers that are quantized in the second one.

    Raises:
        ModelError: They are not the same net.
    """
    layers = watched_layers(quantized.net)
    blobs = {blob for layer in reference.net.layer for blob in (*layer.bottom, *layer.top)}
    blobs |= set(reference.net.input)
    for layer in layers:
        for blob in (*layer.outputs, *(each.blob for each in layer.inputs)):
            if blob not in blobs:
                raise ModelError(
                    f'float_model and quantized_model are not the same net: layer "{layer.name}" of the quantized one '
                    f'works on blob "{blob}", which the float one does not have'
                )
    return ComparedNet(reference, layers), ComparedNet(quantized, layers)


def measure_nets(
    reference: CaffeModel,
    quantized: CaffeModel,
    data: object,
    *,
    statistics: Mapping[str, InputStatistics] | None = None,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    before: Net | None = None,
) -> Measured:
    """Run both nets on data; arguments are those of ``amct.pipeline.compare.measure``, ``before`` is a net.

    Raises:
        ModelError: They are not the same net, or the second one is not quantized.
        ArgumentError: A batch does not have the net's inputs.
        CalibrationError: There is no data.
    """
    if not watched_layers(quantized.net):
        raise ModelError(
            "quantized_model: the net has no Quant layer, so nothing in it is quantized; give the fake-quant or the "
            "deploy model"
        )
    measured = measure(
        *compared_nets(reference, quantized),
        caffe_batches(data, inputs).with_originals(),
        statistics=statistics,
        metric=metric,
        sample_count=lambda _, batch: sample_count(batch),
        before=None if before is None else functools.partial(_output_of, before),
    )
    if not measured.layers:
        raise ModelError("float_model and quantized_model are not the same net: no layer makes outputs of one shape")
    return measured


def compare(
    float_model: FilePair,
    quantized_model: QuantizedModel | FilePair,
    data: object,
    *,
    inputs: BatchInputs | None = None,
    custom_proto: AnyPath | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of the quantized layers, in model order.

    A layer into which BatchNorm, Scale or Bias were folded is compared with the output of the last of them in the float
    model; a layer that only moves values, and whose only reader is a rectifier (ReLU, ReLU6, Clip), behind that one.

    Args:
        float_model: Prototxt and caffemodel of the original.
        quantized_model: What ``quantize`` returned, or prototxt and caffemodel of the fake-quant or deploy model.
        data: An array, or batches as for ``quantize``; one at a time is in memory.
        inputs: Turns a batch into the net's inputs; needed when the batch is not in one of the standard forms.
        custom_proto: A ``custom.proto`` with messages of your own layers.

    Raises:
        ArgumentError, ArgumentTypeError: An argument is invalid, or the data does not fit the net.
        FileError, ParseError: A file cannot be read.
        ModelError: They are not the same net, or the second one is not quantized.
        CalibrationError: There is no data.
    """
    if isinstance(quantized_model, QuantizedModel):
        fake_quant: Any = getattr(quantized_model.prepared, "caffe_model", None)
        if fake_quant is None:
            raise ArgumentTypeError("quantized_model: expected what amct.caffe.quantize returned")
        reference = float_side(float_model, custom_proto)
        quantized = fake_quant(quantized_model.qparams)
    else:
        reference, quantized = both_sides(float_model, quantized_model, custom_proto)
    return list(measure_nets(reference, quantized, data, inputs=inputs).layers.values())
