"""Builds the report of a quantized Caffe model, from memory or from the files that quantization wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amct.arguments import output_file
from amct.caffe.comparing import both_sides, measure_nets, watched_layers
from amct.caffe.model import FEEDFORWARD_TYPES, RECURRENT_TYPES
from amct.caffe.ptq.folding import float_weight
from amct.model.quant_json import notes_beside
from amct.report.content import LayerNote
from amct.report.filling import ReportLayer, ReportSubject, report_content
from amct.report.measuring import MeasuredReport
from amct.report.network import Box, merged_chains
from amct.report.page import write_page

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import torch

    from amct.atomic import AnyPath
    from amct.caffe.comparing import FilePair
    from amct.caffe.engine.messages import ProtoMessage
    from amct.pipeline.batches import BatchInputs
    from amct.report.measuring import Metric
    from amct.report.network import Network


_FLOAT_BYTES = 4


def report_layers(
    net: ProtoMessage, weights: Mapping[str, Sequence[torch.Tensor]], weight_bits: Mapping[str, int]
) -> list[ReportLayer]:
    """The quantized layers of a fake-quant or deploy net.

    Args:
        net: The net.
        weights: The blobs of each layer as real numbers.
        weight_bits: The bit width of each layer with quantized weights.
    """
    messages = {layer.name: layer for layer in net.layer}
    return [
        ReportLayer(
            name=layer.name,
            type=layer.type,
            inputs=tuple(each.grid for each in layer.inputs),
            weight_bits=weight_bits.get(layer.name),
            weight_rows=tuple(_weight_rows(layer.type, messages[layer.name], weights.get(layer.name, ()))),
            weight_bytes=_weight_bytes(weights.get(layer.name, ()), weight_bits.get(layer.name)),
        )
        for layer in watched_layers(net)
    ]


def _weight_rows(kind: str, message: ProtoMessage, blobs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Matrices with one row per output channel; all matrices of a recurrent layer."""
    if kind in RECURRENT_TYPES:
        yield from (blob for blob in blobs if blob.ndim == 2)
    elif kind in FEEDFORWARD_TYPES and blobs:
        yield float_weight(message, blobs[0]).rows()


def _weight_bytes(blobs: Sequence[torch.Tensor], bits: int | None) -> tuple[float, float]:
    """The size of the weights as floats and as integers of ``bits`` bits."""
    if bits is None:
        return 0, 0
    matrices = [blob for blob in blobs if blob.ndim == 2] if len(blobs) > 2 else blobs[:1]
    count = sum(blob.numel() for blob in matrices)
    return _FLOAT_BYTES * count, count * bits / 8


def fused_notes(folded: Mapping[str, Sequence[str]], accelerated: Sequence[str]) -> Iterator[LayerNote]:
    """A note for each folded layer; ``accelerated`` lists the layers that became a 1x1 DepthwiseConv."""
    for head, names in folded.items():
        for name in names:
            into = f'folded into "{head}"' if name != head else ""
            if head in accelerated:
                into = f'became a 1x1 DepthwiseConv, together with "{head}"' if into else "became a 1x1 DepthwiseConv"
            if into:
                yield LayerNote(layer=name, text=into)


_CHEAP_TYPES = "ReLU ReLU6 PReLU ELU Sigmoid TanH Swish HardSwish Flatten Reshape Permute Dropout Split"
"""Merged into the box before."""


def caffe_network(net: ProtoMessage, layers: Collection[str], integer_blobs: Collection[str] = ()) -> Network:
    """The net as a graph.

    Args:
        net: The net, with Input layers.
        layers: The quantized layers.
        integer_blobs: The blobs that are rounded to integers in the quantized file.
    """
    maker: dict[str, int] = {}
    boxes = []
    for layer in net.layer:
        sources = tuple(dict.fromkeys(maker[blob] for blob in layer.bottom if blob in maker))
        quantized = layer.name in layers
        boxes.append(
            Box(
                name=layer.name,
                type=layer.type,
                inputs=sources,
                layer=layer.name if quantized else None,
                integer=quantized or any(blob in integer_blobs for blob in layer.top),
            )
        )
        maker.update({blob: len(boxes) - 1 for blob in layer.top})
    return merged_chains(boxes, frozenset(_CHEAP_TYPES.split()))


def files_report(
    float_model: object,
    quantized_model: object,
    data: object,
    *,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    files: Iterable[AnyPath] = (),
    custom_proto: AnyPath | None = None,
) -> MeasuredReport:
    """The report of a float pair of files and the fake-quant or deploy pair that was quantized from it.

    Reasons and folded layers come from the ``quant.json`` beside the quantized pair.

    Args:
        float_model: Prototxt and caffemodel.
        quantized_model: Prototxt and caffemodel.
        data: Batches.
        metric: ``metric(outputs, batch)``.
        inputs: Turns a batch into the net's inputs.
        files: Files whose sizes are shown, besides those of the two pairs.
        custom_proto: A ``custom.proto`` with messages of the user's own layers.

    Raises:
        ArgumentError, ArgumentTypeError, CalibrationError: an argument, data or metric cannot be used.
        FileError, ParseError, ModelError: a file cannot be read or is invalid.
    """
    reference, quantized = both_sides(float_model, quantized_model, custom_proto)
    shown = (*float_model, *quantized_model, *files)  # type: ignore[misc]  # both were checked to be pairs
    notes = notes_beside(Path(shown[2]))
    weights = {name: blobs for name, blobs in quantized.weights.items() if blobs[0].is_floating_point()}
    bits = {name: entry.weight_bits for name, entry in notes.layers.items() if entry.weight_bits}
    subject = ReportSubject(
        model=reference.net.name or Path(shown[0]).stem,
        layers=tuple(report_layers(quantized.net, weights, bits)),
        fused=tuple(fused_notes(notes.folded, notes.accelerated)),
        skipped=notes.skipped,
        config=notes.config,
        network=caffe_network(reference.net, [*bits]),
        proposals=notes.proposals,
    )
    measured = measure_nets(reference, quantized, data, statistics=subject.statistics(), metric=metric, inputs=inputs)
    name = Path(shown[2]).name
    content = report_content(subject, measured, files=shown, outputs_of=name, layers_of=name)
    return MeasuredReport(content=content, measured=measured)


def report(
    path: AnyPath,
    float_model: FilePair,
    quantized_model: FilePair,
    data: object,
    metric: Metric | None = None,
    *,
    inputs: BatchInputs | None = None,
) -> Path:
    """Write the report of a float pair of files and the pair that was quantized from it.

    The arguments are those of ``compare`` and of ``QuantizedModel.report``.

    Raises:
        AmctError: The subclass tells whether arguments, files, models or data are invalid.
    """
    where = output_file(path, "path")
    write_page(where, files_report(float_model, quantized_model, data, metric=metric, inputs=inputs).content)
    return where
