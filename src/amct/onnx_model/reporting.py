"""Fills a report: runs the float and the quantized model on data and gathers what their layers show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct import progress
from amct.config.plan_text import config_text
from amct.numerics.dmq import balance_activation
from amct.onnx_model.calibrating import watch_layers
from amct.onnx_model.comparing import Pair
from amct.onnx_model.runtime import as_tensor
from amct.report.content import LayerNote, ReportContent
from amct.report.filling import figures, file_sizes, measured_on, now, versions
from amct.report.measuring import Measuring, check_metric
from amct.report.recorded_layers import recorded_layer, recorded_statistics

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.config.plan import LayerPlan
    from amct.onnx_model.batches import Batches, Feeds
    from amct.onnx_model.preparation import Preparation
    from amct.record import LayerRecord, Record
    from amct.report.content import LayerContent
    from amct.report.measuring import Measured, Metric


@dataclass(frozen=True, kw_only=True, eq=False)
class Reported:
    """What a report is about.

    Attributes:
        preparation: The model as it was prepared.
        record: Its complete factors.
        simulated: The quantized model by standard operators.
        example: The first calibration batch.
    """

    preparation: Preparation
    record: Record
    simulated: ModelProto
    example: Feeds


def report_content(
    reported: Reported,
    data: Batches | None,
    metric: Metric | None = None,
    files: Iterable[str | os.PathLike[str]] = (),
) -> ReportContent:
    """Everything the report of a quantized model shows.

    Args:
        reported: what it is about.
        data: the data; None: the first calibration batch.
        metric: accuracy of one batch.
        files: whose sizes are shown.

    Raises:
        ArgumentTypeError: the metric gives no number.
        CalibrationError: there is no data.
        ArgumentError: a metric without data, whose labels it needs.
        FileError: one of the files cannot be looked at.
    """
    check_metric(metric, data)
    sizes = file_sizes(files)
    preparation = reported.preparation
    originals = data.with_originals() if data is not None else iter([(reported.example, reported.example)])
    measured = _measure(reported, originals, metric)
    return ReportContent(
        model=preparation.source.name,
        measured_on=measured_on(measured) if data is not None else "the first calibration batch",
        figures=tuple(figures(measured, _weight_bytes(preparation))),
        files=sizes,
        layers=tuple(_layer(preparation, plan, reported.record[plan.name], measured) for plan in preparation.layers),
        fused=tuple(
            LayerNote(layer=norm, text=f'folded into "{layer}"') for layer, norm in preparation.folded.fusions.items()
        ),
        skipped=tuple(LayerNote(layer=skip.layer, text=skip.reason) for skip in preparation.skips),
        config=config_text(preparation.plan),
        versions=versions(),
        created=now(),
    )


def _measure(reported: Reported, originals: Iterator[tuple[Any, Feeds]], metric: Metric | None) -> Measured:
    preparation = reported.preparation
    reference, watched = watch_layers(preparation.folded.model, preparation)
    statistics = {name: recorded_statistics(reported.record[name]) for name in preparation.weights}
    measuring = Measuring(statistics, metric)
    batches: list[tuple[Any, int]] = []

    def feeds() -> Iterator[Feeds]:
        for batch, given in progress.track(originals, "Measuring"):
            batches[:] = [(batch, _samples(given))]
            yield given

    pair = Pair.of(reference, reported.simulated)
    names = [each.input for each in watched.values()]
    for expected, got in pair.run(feeds(), measuring, names):
        for name, tensors in watched.items():
            x, weights = as_tensor(expected[tensors.input]), preparation.weights[name]
            if weights.balance is not None:  # the grid is that of the balanced input
                x = balance_activation(x, weights.balance, weights.channel_axis)
            statistics[name].add(x)
        batch, samples = batches[0]
        measuring.score(_for_metric(pair, expected), _for_metric(pair, got), batch, samples)
    return measuring.result()


def _samples(feeds: Feeds) -> int:
    first = next(iter(feeds.values()))
    return int(first.shape[0]) if first.ndim else 1


def _for_metric(pair: Pair, values: Mapping[str, NDArray[Any]]) -> object:
    """The output of a model with one, a dict of those of a model with several."""
    outputs = {name: values[name] for name in pair.outputs}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _weight_bytes(preparation: Preparation) -> tuple[float, float]:
    before = after = 0.0
    for weights in preparation.weights.values():
        for weight in weights.floats:
            before += weight.numel() * weight.element_size()
            after += weight.numel() * weights.recorded_bits / 8
    return before, after


def _layer(preparation: Preparation, plan: LayerPlan, entry: LayerRecord, measured: Measured) -> LayerContent:
    weights = preparation.weights[plan.name]
    bits = weights.bits if weights.factors else None
    return recorded_layer(plan, entry, measured, weight_bits=bits, rows=weights.rows())
