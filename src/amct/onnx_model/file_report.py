"""Fills a report from files: a float ONNX model, and the QDQ or fake-quant file that quantization made of it.

The grids of a QDQ file stand in its own nodes; those of a fake-quant file in the record beside it. Reasons and folded
layers come from the ``quant.json`` beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct import progress
from amct.errors import ModelError
from amct.export.exported import rescaled_layers
from amct.export.onnx.graph import OnnxGraph
from amct.model.quant_json import QuantJson, file_beside, notes_beside
from amct.numerics.arq import channels_first
from amct.numerics.dmq import balance_activation
from amct.onnx_model.batches import Batches
from amct.onnx_model.comparing import Pair
from amct.onnx_model.folding import fold
from amct.onnx_model.layers import find_all_layers, reads_rescaled
from amct.onnx_model.reading import read_model
from amct.onnx_model.runtime import as_tensor
from amct.onnx_model.weights import float_weights
from amct.record import Record, read_record
from amct.report.activations import InputStatistics
from amct.report.content import LayerContent, LayerNote, ReportContent
from amct.report.filling import figures, file_sizes, measured_on, now, versions, weight_ranges
from amct.report.measuring import MeasuredReport, Measuring

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from onnx import ModelProto, NodeProto

    from amct.onnx_model.batches import BatchInputs, Feeds
    from amct.onnx_model.layers import FoundLayer
    from amct.onnx_model.reading import AnyModel
    from amct.report.measuring import Measured, Metric

_FLOAT_BYTES = 4
_BALANCE = ".tensor_balance_factor"
"""How the exporter calls the constant that an input is multiplied with before it is quantized."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportedLayer:
    """A quantized layer: what it is in the float model, and the grid of its input."""

    found: FoundLayer
    scale: float
    offset: int
    bits: int
    weight_bits: int | None
    balance: torch.Tensor | None = None

    @property
    def input(self) -> str:
        """The tensor that is quantized for it."""
        return self.found.layer.reader.input[0]

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """What the grid is laid over: the input, balanced where DMQ balances it."""
        if self.balance is None:
            return x
        axis = 1 if self.found.layer.node.op_type in ("Conv", "ConvTranspose") else -1
        return balance_activation(x, self.balance, axis)

    def rows(self) -> list[torch.Tensor]:
        """The float weights by output channel."""
        layer = self.found.layer
        if layer.weight is None:
            return []
        kind = layer.kind.weight_kind
        return [channels_first(weight, kind, layer.groups) for weight in float_weights(layer, self.balance)]


def files_report(
    float_model: AnyModel,
    quantized_file: str | os.PathLike[str],
    data: object,
    *,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    files: Iterable[str | os.PathLike[str]] = (),
    name: str | None = None,
) -> MeasuredReport:
    """The report of a float model and of a file that quantization made of it.

    Args:
        float_model: A path, the bytes of a file or a ModelProto.
        quantized_file: The QDQ or fake-quant file.
        data: An array, a dict of arrays by input name, or an iterable of batches.
        metric: ``metric(output, batch)``, the mean over one batch; several outputs are a dict of arrays.
        inputs: Makes of a batch what the model is fed with.
        files: Whose sizes are shown.
        name: The model's name; that of the file when None.

    Raises:
        FileError, ParseError: a file cannot be read.
        ModelError: a model cannot be run, they do not belong together, or nothing tells the grids.
        ArgumentError, ArgumentTypeError, CalibrationError: the data or the metric cannot be used.
    """
    sizes = file_sizes(files)
    source = read_model(float_model, "float_model")
    other = read_model(quantized_file, "quantized_model", allow_quantized=True).model
    notes = notes_beside(Path(quantized_file))
    unfolded = [layer for layer in notes.layers if layer not in notes.folded]
    reference = fold(source.model, skip=unfolded).model
    layers = _reported_layers(reference, other, Path(quantized_file), notes)
    batches = Batches(reference, data, inputs)
    measured = _measure(Pair.of(reference, other), layers, batches, metric)
    content = ReportContent(
        model=name or source.name,
        measured_on=measured_on(measured),
        figures=tuple(figures(measured, _weight_bytes(layers))),
        files=sizes,
        layers=tuple(_content(layer, measured) for layer in layers),
        fused=tuple(
            LayerNote(layer=norm, text=f'folded into "{layer}"')
            for layer, norms in notes.folded.items()
            for norm in norms
        ),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in notes.skipped),
        config=notes.config,
        versions=versions(),
        created=now(),
    )
    return MeasuredReport(content=content, measured=measured)


# -- the layers --------------------------------------------------------------------------------------------------------


def _reported_layers(
    reference: ModelProto, other: ModelProto, quantized_file: Path, notes: QuantJson
) -> list[ReportedLayer]:
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
            scale, offset, bits = grid
            layers.append(
                ReportedLayer(
                    found=found,
                    scale=scale,
                    offset=offset,
                    bits=bits,
                    weight_bits=weight_bits.get(name) if found.layer.weight is not None else None,
                    balance=_balance(record, name),
                )
            )
    if not layers:
        beside = (
            f"{record_file.name} beside it has none either" if record else f"there is no {record_file.name} beside it"
        )
        raise ModelError(
            f'quantized_model: "{quantized_file}" quantizes no layer of the float model: none is fed by a '
            f"DequantizeLinear, and {beside}"
        )
    return layers


def _balance(record: Record, name: str) -> torch.Tensor | None:
    factors = record[name].tensor_balance_factor if name in record.layers else ()
    return torch.tensor(factors) if factors else None


def _grid_of_nodes(graph: OnnxGraph, reader: NodeProto) -> tuple[float, int, int] | None:
    """Scale, offset of signed integers and bits of a node's input in a QDQ file; None where it is balanced before."""
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
    return float(scale.reshape(-1)[0]), int(zero.reshape(-1)[0]) - shift, bits


def _grid_of_record(record: Record, name: str) -> tuple[float, int, int] | None:
    if name not in record.layers:
        return None
    entry = record[name]
    if entry.scale_d is None or entry.offset_d is None:
        return None
    return entry.scale_d, entry.offset_d, int(entry.activation_type.removeprefix("INT"))


# -- the runs and the content ------------------------------------------------------------------------------------------


def _measure(pair: Pair, layers: list[ReportedLayer], batches: Batches, metric: Metric | None) -> Measured:
    statistics = {each.found.name: InputStatistics(each.scale, each.offset, each.bits) for each in layers}
    measuring = Measuring(statistics, metric)
    current: list[tuple[Any, int]] = []

    def feeds() -> Iterator[Feeds]:
        for batch, given in progress.track(batches.with_originals(), "Measuring"):
            first = next(iter(given.values()))
            current[:] = [(batch, int(first.shape[0]) if first.ndim else 1)]
            yield given

    for expected, got in pair.run(feeds(), measuring, [each.input for each in layers]):
        for each in layers:
            statistics[each.found.name].add(each.values(as_tensor(expected[each.input])))
        batch, samples = current[0]
        measuring.score(_for_metric(pair, expected), _for_metric(pair, got), batch, samples)
    return measuring.result()


def _for_metric(pair: Pair, values: Mapping[str, Any]) -> object:
    """The output of a model with one, a dict of those of a model with several."""
    outputs = {name: values[name] for name in pair.outputs}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _content(layer: ReportedLayer, measured: Measured) -> LayerContent:
    compared = measured.layers.get(layer.found.name)
    return LayerContent(
        name=layer.found.name,
        type=layer.found.type,
        activation_bits=layer.bits,
        weight_bits=layer.weight_bits,
        scale=layer.scale,
        offset=layer.offset,
        sqnr=compared.sqnr if compared is not None else None,
        cosine=compared.cosine if compared is not None else None,
        activation=measured.inputs[layer.found.name],
        weights=weight_ranges(layer.rows()),
    )


def _weight_bytes(layers: Iterable[ReportedLayer]) -> tuple[float, float]:
    before = after = 0.0
    for each in layers:
        count = sum(rows.numel() for rows in each.rows()) if each.weight_bits else 0
        before += _FLOAT_BYTES * count
        after += count * _stored_bits(each.weight_bits or 0) / 8
    return before, after


def _stored_bits(bits: int) -> int:
    """What a weight takes in the file: a narrow one has the integers of the next width that a file knows."""
    return next((width for width in (4, 8, 16) if bits <= width), bits)
