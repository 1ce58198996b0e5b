"""Accumulates measurements of the float and the quantized model over batches: layers, inputs, outputs and a metric.

Memory use is constant. The callers (the PyTorch, Caffe and ONNX packages) run the models and pass the tensors in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.model.quant_json import Measurement, MetricValues
from amct.model.verdict import HANDED_IN, judge
from amct.numerics.similarity import BoxMatching, Comparison

if TYPE_CHECKING:
    from torch import Tensor

    from amct.model.verdict import Verdict
    from amct.numerics.similarity import BoxComparison, LayerComparison
    from amct.report.activations import InputStatistics
    from amct.report.content import ActivationContent, ReportContent

Metric = Callable[[Any, Any], float]
"""``metric(output, batch)`` returns the mean over the samples of a batch; ``batch`` is an item of the data."""

OUTPUT = "output"
"""The name of the output of a model that has no names for its outputs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a float model and its quantized model.

    Attributes:
        layers: The comparison of each layer's output.
        inputs: The statistics of each observed input.
        outputs: The comparison of the model's outputs.
        boxes: That of the boxes in the outputs of a detector.
        possible_boxes: That of every output that has the form of boxes, and the outputs that it stands for.
        metric: The metric of the float and of the quantized model.
        metric_name: The name of the metric in the report.
        batches: The number of batches.
    """

    layers: Mapping[str, LayerComparison] = field(default_factory=dict)
    inputs: Mapping[str, ActivationContent | None] = field(default_factory=dict)
    outputs: tuple[LayerComparison, ...] = ()
    boxes: tuple[BoxComparison, ...] = ()
    possible_boxes: Mapping[BoxComparison, frozenset[str]] = field(default_factory=dict)
    metric: tuple[float, float] | None = None
    metric_name: str = ""
    batches: int = 0

    def verdict(self, of: str, *, is_trained: bool = False) -> Verdict | None:
        """The judgement of what was measured; ``of`` is what the outputs were measured of.

        ``is_trained``: The outputs were compared with those of the float model that was handed in for training.
        """
        layers = ((name, compared.sqnr) for name, compared in self.layers.items())
        found = judge([output.sqnr for output in self.outputs], self.metric, layers, self.boxes)
        if found is not None and is_trained and self.metric is None:
            found = replace(found, reasons=(*found.reasons, f"compared with {HANDED_IN}"))
        return None if found is None else replace(found, of=of)

    def as_boxes(self) -> Measured:
        """The same with boxes in place of the outputs that have the form of boxes, also where their number is fixed.

        Raises:
            ArgumentError: No output has this form.
        """
        if not self.possible_boxes:
            raise ArgumentError(
                "no output holds boxes; known are rows of image, label, score, x1, y1, x2, y2 (DetectionOutput), rows "
                "of x1, y1, x2, y2, score, label (YOLO), and an output of boxes beside one of their scores"
            )
        gone = frozenset[str]().union(*self.possible_boxes.values())
        outputs = tuple(each for each in self.outputs if each.layer not in gone)
        return replace(self, boxes=tuple(self.possible_boxes), outputs=outputs)

    def as_measurement(self, of: str) -> Measurement:
        """The numbers that quant.json keeps; ``of`` is what the layers were measured of."""
        metric = None
        if self.metric is not None:
            metric = MetricValues(name=self.metric_name, float_model=self.metric[0], quantized=self.metric[1])
        return Measurement(
            of=of,
            on=f"{self.batches} batches",
            layers={name: _finite(compared.sqnr) for name, compared in self.layers.items()},
            outputs={compared.layer: _finite(compared.sqnr) for compared in self.outputs},
            boxes=self.boxes,
            metric=metric,
        )


def _finite(sqnr: float) -> float | None:
    """None for a layer without error, which JSON has no number for; NaN is the worst."""
    return None if sqnr == math.inf else round(sqnr, 3) if math.isfinite(sqnr) else -999.0


@dataclass(frozen=True, kw_only=True)
class MeasuredReport:
    """The content of a report, and its measurements."""

    content: ReportContent
    measured: Measured


class Measuring:
    """Accumulates the results of two models on the same batches.

    Attributes:
        layers: The comparison of the layers' outputs, updated by the caller.
        inputs: The statistics of the inputs, updated by the caller.
        detections: The boxes of the outputs, updated by the caller.
    """

    def __init__(self, inputs: Mapping[str, InputStatistics], metric: Metric | None = None) -> None:
        self.layers = Comparison()
        self.detections = BoxMatching()
        self.inputs = inputs
        self._outputs = Comparison()
        self._metric = metric
        self._sums = [0.0, 0.0]
        self._samples = 0
        self._batches = 0

    def add(self, outputs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Add one batch: for each output its name and its values in the float and in the quantized model."""
        for name, expected, got in outputs:
            self._outputs.add(name, expected, got)
        self._batches += 1

    def score(self, expected: object, got: object, batch: object, samples: int) -> None:
        """Add the metric of one batch for both models, weighted by the number of samples; nothing without a metric.

        Args:
            expected: The output of the float model.
            got: The output of the quantized model.
            batch: The batch, as the data provides it.
            samples: The number of samples in the batch.

        Raises:
            ArgumentTypeError: The metric does not return a number.
        """
        if self._metric is None:
            return
        for place, output in enumerate((expected, got)):
            value = self._metric(output, batch)
            try:
                self._sums[place] += float(value) * samples
            except (TypeError, ValueError, RuntimeError) as error:
                raise ArgumentTypeError(
                    f"metric: expected a number for each batch, got {type(value).__name__}; "
                    "let it return the mean over the batch, such as (output.argmax(1) == batch[1]).float().mean()"
                ) from error
        self._samples += samples

    def result(self) -> Measured:
        """Return the measurements.

        Raises:
            CalibrationError: There was no batch.
        """
        if self._batches == 0:
            raise CalibrationError(
                "data is empty; a report needs at least one batch, or None for the calibration batch"
            )
        scored = self._metric is not None and self._samples > 0
        return Measured(
            layers={found.layer: found for found in self.layers.layers()},
            inputs={name: statistics.result() for name, statistics in self.inputs.items()},
            outputs=tuple(each for each in self._outputs.layers() if each.layer not in self.detections.names),
            boxes=self.detections.comparisons(),
            possible_boxes=self.detections.possible(),
            metric=(self._sums[0] / self._samples, self._sums[1] / self._samples) if scored else None,
            metric_name=metric_name(self._metric),
            batches=self._batches,
        )


def check_metric(metric: Metric | None, data: object) -> None:
    """Check that a metric comes with data, because it needs labels.

    Raises:
        ArgumentError: There is a metric but no data.
    """
    if metric is not None and data is None:
        raise ArgumentError("metric: it needs data, with labels; pass data= too")


def metric_name(metric: Metric | None) -> str:
    """What a metric is called in reports."""
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name.replace("_", " ")
