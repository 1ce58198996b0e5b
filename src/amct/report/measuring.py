"""Sums up two runs of a model side by side: layers, inputs, outputs and a metric, batch by batch.

What is kept does not grow with the data. A front door runs the models and hands over what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.report.similarity import Comparison

if TYPE_CHECKING:
    from torch import Tensor

    from amct.report.activations import InputStatistics
    from amct.report.content import ActivationContent, ReportContent
    from amct.report.similarity import LayerComparison

Metric = Callable[[Any, Any], float]
"""``metric(output, batch)``: the mean over the samples of one batch, which is as the data gave it."""

OUTPUT = "output"
"""The name of the output of a model that has no names for its outputs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the runs showed.

    Attributes:
        layers: Each layer's output in both models.
        inputs: What was seen of each watched input.
        outputs: The model's outputs.
        metric: Of the float and of the quantized model.
        metric_name: As the report calls it.
        batches: How many were run.
    """

    layers: Mapping[str, LayerComparison] = field(default_factory=dict)
    inputs: Mapping[str, ActivationContent | None] = field(default_factory=dict)
    outputs: tuple[LayerComparison, ...] = ()
    metric: tuple[float, float] | None = None
    metric_name: str = ""
    batches: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasuredReport:
    """A report, and the measurements in it."""

    content: ReportContent
    measured: Measured


class Measuring:
    """Takes in what two models make of the same batches.

    Attributes:
        layers: Where the layers' outputs are compared.
        inputs: The statistics of the inputs, which the front door feeds.
    """

    def __init__(self, inputs: Mapping[str, InputStatistics], metric: Metric | None = None) -> None:
        self.layers = Comparison()
        self.inputs = inputs
        self._outputs = Comparison()
        self._metric = metric
        self._sums = [0.0, 0.0]
        self._samples = 0
        self._batches = 0

    def add(self, outputs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Take in one batch: each output's name, of the float and of the quantized model."""
        for name, expected, got in outputs:
            self._outputs.add(name, expected, got)
        self._batches += 1

    def score(self, expected: object, got: object, batch: object, samples: int) -> None:
        """Let the metric judge both models' outputs of one batch, which counts as much as it has samples.

        Raises:
            ArgumentTypeError: the metric gives no number.
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
        """What was seen.

        Raises:
            CalibrationError: there was no batch.
        """
        if self._batches == 0:
            raise CalibrationError(
                "data is empty; a report needs at least one batch, or None for the calibration batch"
            )
        scored = self._metric is not None and self._samples > 0
        return Measured(
            layers={found.layer: found for found in self.layers.layers()},
            inputs={name: statistics.result() for name, statistics in self.inputs.items()},
            outputs=tuple(self._outputs.layers()),
            metric=(self._sums[0] / self._samples, self._sums[1] / self._samples) if scored else None,
            metric_name=_name_of(self._metric),
            batches=self._batches,
        )


def check_metric(metric: Metric | None, data: object) -> None:
    """Refuse a metric without data, whose labels it needs.

    Raises:
        ArgumentError: there is a metric and no data.
    """
    if metric is not None and data is None:
        raise ArgumentError("metric: it needs data, with labels; pass data= too")


def _name_of(metric: Metric | None) -> str:
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name.replace("_", " ")
