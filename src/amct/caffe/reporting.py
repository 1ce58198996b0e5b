"""Fills a report of a quantized Caffe model: from the one in memory, or from the files that quantization wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amct.caffe.comparing import both_sides, measure, watched_layers
from amct.caffe.model import FEEDFORWARD_TYPES, RECURRENT_TYPES
from amct.caffe.ptq.weight_layout import layout_of
from amct.config.plan import config_text
from amct.model.quant_json import notes_beside
from amct.numerics.arq import channels_first
from amct.report.content import InputContent, LayerContent, LayerNote, ReportContent
from amct.report.filling import figures, file_sizes, measured_on, now, versions, weight_ranges
from amct.report.measuring import MeasuredReport

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from amct.caffe.comparing import QuantizedFiles, Side, WatchedLayer
    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.ptq.deploy import Results
    from amct.caffe.ptq.graph import QuantGraph
    from amct.caffe.running import BatchInputs
    from amct.report.measuring import Measured, Metric

    AnyPath = str | os.PathLike[str]

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a quantized net besides what runs show.

    Attributes:
        model: The net's name.
        weights: The blobs of each layer, as real numbers.
        weight_bits: Of each layer with quantized weights.
        fused: What was folded into which layer.
        skipped: What stays float, and why.
        config: The config used, as text.
    """

    model: str
    weights: Mapping[str, Sequence[torch.Tensor]]
    weight_bits: Mapping[str, int]
    fused: tuple[LayerNote, ...] = ()
    skipped: tuple[LayerNote, ...] = ()
    config: str = ""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Two nets and what they are run on.

    Attributes:
        reference: The float net.
        quantized: The quantized net.
        data: Batches.
        metric: ``metric(outputs, batch)``.
        inputs: Makes of a batch what the net takes.
        on: What the data is called; None: so many batches.
    """

    reference: Side
    quantized: Side
    data: object
    metric: Metric | None = None
    inputs: BatchInputs | None = None
    on: str | None = None

    def measure(self) -> Measured:
        """Run both nets."""
        return measure(self.reference, self.quantized, self.data, metric=self.metric, inputs=self.inputs)


def model_report(graph: QuantGraph, results: Results, runs: Runs, files: Iterable[AnyPath] = ()) -> ReportContent:
    """The report of a model in memory.

    Raises:
        ArgumentError, ArgumentTypeError, CalibrationError: data or metric cannot be used.
        FileError: one of the files cannot be looked at.
    """
    facts = Facts(
        model=graph.model.net.name or "net",
        weights=graph.model.weights,
        weight_bits={name: entry.weight_bits for name, entry in results.record.items() if entry.scale_w},
        fused=tuple(_folded(graph.fusion.folded, graph.fusion.accelerated)),
        skipped=(
            *(LayerNote(layer=name, text=reason) for name, reason in graph.not_quantized.items()),
            *(LayerNote(layer=skip.layer, text=f"not folded: {skip.reason}") for skip in graph.fusion.skipped),
        ),
        config=config_text(graph.plan),
    )
    return report_of(facts, runs, files).content


def files_report(
    float_model: object,
    quantized_model: object,
    data: object,
    *,
    metric: Metric | None = None,
    inputs: BatchInputs | None = None,
    files: Iterable[AnyPath] = (),
) -> MeasuredReport:
    """The report of a float pair of files and the fake-quant or deploy pair that quantization made of it.

    Reasons and folded layers come from the ``quant.json`` beside the quantized pair.

    Args:
        float_model: Prototxt and caffemodel.
        quantized_model: Prototxt and caffemodel.
        data: Batches.
        metric: ``metric(outputs, batch)``.
        inputs: Makes of a batch what the net takes.
        files: Whose sizes are shown, besides those of the two pairs.

    Raises:
        ArgumentError, ArgumentTypeError, CalibrationError: an argument, data or metric cannot be used.
        FileError, ParseError, ModelError: a file is not what it should be.
    """
    reference, quantized = both_sides(float_model, quantized_model)
    runs = Runs(reference=reference, quantized=quantized, data=data, metric=metric, inputs=inputs)
    shown = (*float_model, *quantized_model, *files)  # type: ignore[misc]  # both were checked to be pairs
    name = reference.message.name or Path(shown[0]).stem
    return report_of(_facts_of_files(name, quantized), runs, shown)


def _facts_of_files(name: str, quantized: QuantizedFiles) -> Facts:
    notes = notes_beside(quantized.model_file)
    return Facts(
        model=name,
        weights=quantized.real_weights(),
        weight_bits={head: entry.weight_bits for head, entry in notes.layers.items() if entry.weight_bits},
        fused=tuple(_folded(notes.folded, notes.accelerated)),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in notes.skipped),
        config=notes.config,
    )


def _folded(folded: Mapping[str, Sequence[str]], accelerated: Sequence[str]) -> Iterator[LayerNote]:
    for head, names in folded.items():
        for name in names:
            into = f'folded into "{head}"' if name != head else ""
            if head in accelerated:
                into = f'became a 1x1 DepthwiseConv, together with "{head}"' if into else "became a 1x1 DepthwiseConv"
            if into:
                yield LayerNote(layer=name, text=into)


# ------------------------------------------------------------------ the content


def report_of(facts: Facts, runs: Runs, files: Iterable[AnyPath] = ()) -> MeasuredReport:
    """Run the nets and put everything together."""
    sizes = file_sizes(files)
    watched = watched_layers(runs.quantized.message)
    measured = runs.measure()
    messages = {layer.name: layer for layer in runs.quantized.message.layer}
    content = ReportContent(
        model=facts.model,
        measured_on=runs.on or measured_on(measured),
        figures=tuple(figures(measured, _weight_bytes(facts))),
        files=sizes,
        layers=tuple(_layer(layer, messages[layer.name], facts, measured) for layer in watched),
        fused=facts.fused,
        skipped=facts.skipped,
        config=facts.config,
        versions=versions(),
        created=now(),
    )
    return MeasuredReport(content=content, measured=measured)


def _layer(layer: WatchedLayer, message: ProtoMessage, facts: Facts, measured: Measured) -> LayerContent:
    compared = measured.layers.get(layer.name)
    first, *others = (
        InputContent(
            bits=each.factors.bits,
            scale=each.factors.scale,
            offset=each.factors.offset,
            activation=measured.inputs[layer.key(index)],
        )
        for index, each in enumerate(layer.inputs)
    )
    return LayerContent(
        name=layer.name,
        type=layer.type,
        activation_bits=first.bits,
        weight_bits=facts.weight_bits.get(layer.name),
        scale=first.scale,
        offset=first.offset,
        sqnr=compared.sqnr if compared is not None else None,
        cosine=compared.cosine if compared is not None else None,
        activation=first.activation,
        other_inputs=tuple(others),
        weights=weight_ranges(_weight_rows(layer.type, message, facts.weights.get(layer.name, ()))),
    )


def _weight_rows(kind: str, message: ProtoMessage, blobs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A row each output channel; of a recurrent layer, all its matrices."""
    if kind in RECURRENT_TYPES:
        yield from (blob for blob in blobs if blob.ndim == 2)
    elif kind in FEEDFORWARD_TYPES and blobs:
        layout = layout_of(message, blobs[0])
        yield channels_first(layout.rows_first(), layout.kind, layout.groups)


def _weight_bytes(facts: Facts) -> tuple[float, float]:
    before = after = 0.0
    for name, bits in facts.weight_bits.items():
        blobs = facts.weights.get(name, ())
        matrices = [blob for blob in blobs if blob.ndim == 2] if len(blobs) > 2 else blobs[:1]
        count = sum(blob.numel() for blob in matrices)
        before += _FLOAT_BYTES * count
        after += count * bits / 8
    return before, after
