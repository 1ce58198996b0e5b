"""Builds a report from files: a float ONNX model, and the QDQ or fake-quant file that was quantized from it.

The quantization grids of a QDQ file are in its nodes; those of a fake-quant file are in the record beside it. Reasons
and folded layers come from the ``quant.json`` beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.atomic import Snapshot
from amct.errors import ModelError
from amct.export.formats import rescaled_layers
from amct.export.onnx.graph import OnnxGraph
from amct.model.quant_json import QuantJson, file_beside, notes_beside
from amct.numerics.qparams import QParams
from amct.onnx_model.batches import onnx_batches, sample_count
from amct.onnx_model.comparing import Pair
from amct.onnx_model.folding import fold
from amct.onnx_model.layers import find_all_layers, float_weights, reads_rescaled
from amct.onnx_model.reading import read_model
from amct.pipeline.compare import measure
from amct.record import Record, read_record
from amct.report.filling import ReportLayer, ReportSubject, folded_notes, report_content
from amct.report.measuring import MeasuredReport
from amct.report.network import onnx_network

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from onnx import ModelProto, NodeProto

    from amct.export.onnx.layer import OnnxLayer
    from amct.onnx_model.layers import FoundLayer
    from amct.onnx_model.reading import AnyModel
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.weights import FloatWeight
    from amct.report.measuring import Metric

_FLOAT_BYTES = 4
_BALANCE = ".tensor_balance_factor"
"""The exporter's name suffix of the constant that multiplies an input before quantization."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """A quantized layer: its form in the float model, and the grid of its input."""

    found: FoundLayer
    grid: QParams
    weights: tuple[FloatWeight, ...]
    weight_bits: int | None

    def balanced_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as its quantizer gets it."""
        return self.weights[0].balanced_input(x) if self.weights else x

    def reported(self) -> ReportLayer:
        count = sum(source.tensor.numel() for source in self.weights) if self.weight_bits else 0
        return ReportLayer(
            name=self.found.name,
            type=self.found.type,
            inputs=(self.grid,),
            weight_bits=self.weight_bits,
            weight_rows=[source.rows() for source in self.weights],
            weight_bytes=(_FLOAT_BYTES * count, count * _stored_bits(self.weight_bits or 0) / 8),
        )


def files_report(  # noqa: PLR0913  most of them say what the report tells besides
    float_model: AnyModel,
    quantized_file: str | os.PathLike[str],
    data: object,
    *,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    files: Iterable[str | os.PathLike[str]] = (),
    name: str | None = None,
    runtime: str | None = None,
) -> MeasuredReport:
    """The report of a float model and of a file that was quantized from it.

    Args:
        float_model: A path, the bytes of a file or a ModelProto.
        quantized_file: The QDQ or fake-quant file.
        data: An array, a dict of arrays by input name, or an iterable of batches.
        metric: ``metric(output, batch)``, the mean over one batch; several outputs are a dict of arrays.
        inputs: Turns a batch into the model's inputs.
        files: Files whose sizes are shown.
        name: The model's name; by default the file name.
        runtime: What runs the file; by default onnxruntime.

    Raises:
        FileError, ParseError: a file cannot be read.
        ModelError: a model cannot be run, the models do not match, or no file has the grids.
        ArgumentError, ArgumentTypeError, CalibrationError: the data or the metric cannot be used.
    """
    source = read_model(float_model, "float_model")
    file = Snapshot(quantized_file)
    other = read_model(quantized_file, "quantized_model", allow_quantized=True).model
    notes = notes_beside(Path(quantized_file))
    file.check_unchanged()
    unfolded = [layer for layer in notes.layers if layer not in notes.folded]
    reference = fold(source.model, skip=unfolded).model
    layers = _layers(reference, other, Path(quantized_file), notes)
    subject = ReportSubject(
        model=name or source.name,
        layers=tuple(layer.reported() for layer in layers),
        fused=folded_notes(notes.folded),
        skipped=notes.skipped,
        config=notes.config,
        network=onnx_network(reference, [layer.found.name for layer in layers], _integer_tensors(other)),
    )
    watched = {each.found.name: (each.found.layer.reader.input[0], each.balanced_input) for each in layers}
    measured = measure(
        *Pair.of(reference, other).models(watched, runtime=runtime),
        onnx_batches(reference, data, inputs).with_originals(),
        statistics=subject.statistics(),
        metric=metric,
        sample_count=lambda _, feeds: sample_count(feeds),
    )
    of = Path(quantized_file).name if runtime is None else f"{Path(quantized_file).name} in {runtime}"
    content = report_content(subject, measured, files=files, outputs_of=of, layers_of=of)
    return MeasuredReport(content=content, measured=measured)


def _integer_tensors(model: ModelProto) -> set[str]:
    """The tensors that are quantized in a QDQ file."""
    return {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}


# -- the layers --------------------------------------------------------------------------------------------------------


def _layers(reference: ModelProto, other: ModelProto, quantized_file: Path, notes: QuantJson) -> list[_Layer]:
    record_file = file_beside(quantized_file, "record.txt")
    record = read_record(record_file) if record_file.is_file() else Record()
    own, graph = OnnxGraph(reference), OnnxGraph(other)
    rescaled = rescaled_layers(other)
    nodes = {node.name: node for node in graph.nodes}
    weight_bits = notes.weight_bits(quantized_file.name)
    layers = []
    for name, found in find_all_layers(reference).found.items():
        grid, reader = None, nodes.get(found.layer.reader.name)
        if reader is not None and not reads_rescaled(found.layer, own, rescaled):
            grid = _grid_of_nodes(graph, reader)
        grid = grid or _grid_of_record(record, name)
        if grid is not None:
            bits = weight_bits.get(name) if found.layer.weight is not None else None
            weights = _balanced_weights(found.layer, record)
            layers.append(_Layer(found=found, grid=grid, weights=weights, weight_bits=bits))
    if not layers:
        beside = (
            f"{record_file.name} beside it has none either" if record else f"there is no {record_file.name} beside it"
        )
        raise ModelError(
            f'quantized_model: "{quantized_file}" quantizes no layer of the float model: none is fed by a '
            f"DequantizeLinear, and {beside}"
        )
    return layers


def _balanced_weights(layer: OnnxLayer, record: Record) -> tuple[FloatWeight, ...]:
    """The weights of the float model, the first multiplied by the balance factors of the record."""
    factors = record[layer.name].tensor_balance_factor if layer.name in record.layers else ()
    balance = torch.tensor(factors) if factors else None
    return tuple(replace(each, balance=None if number else balance) for number, each in enumerate(float_weights(layer)))


def _grid_of_nodes(graph: OnnxGraph, reader: NodeProto) -> QParams | None:
    """The grid of a node's input in a QDQ file, with a signed offset; None if the input is balanced."""
    dequantize = graph.producer(reader.input[0])
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or len(dequantize.input) < 3:
        return None
    quantize = graph.producer(dequantize.input[0])
    before = graph.producer(quantize.input[0]) if quantize is not None else None
    if before is not None and any(name.endswith(_BALANCE) for name in before.input):
        return None
    scale, zero = graph.constant(dequantize.input[1]), graph.constant(dequantize.input[2])
    if scale is None or zero is None or scale.size != 1:
        return None
    bits = 8 * zero.dtype.itemsize
    shift = 1 << (bits - 1) if np.issubdtype(zero.dtype, np.unsignedinteger) else 0
    return QParams.of(float(scale.reshape(-1)[0]), int(zero.reshape(-1)[0]) - shift, bits)


def _grid_of_record(record: Record, name: str) -> QParams | None:
    if name not in record.layers:
        return None
    entry = record[name]
    if entry.scale_d is None or entry.offset_d is None:
        return None
    bits = int(entry.activation_type.removeprefix("INT"))
    return QParams.of(entry.scale_d, entry.offset_d, bits)


def _stored_bits(bits: int) -> int:
    """The storage width of a weight: narrow weights are stored in the next wider type of the file."""
    return next((width for width in (4, 8, 16) if bits <= width), bits)
