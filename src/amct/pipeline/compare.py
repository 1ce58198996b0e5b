"""Runs a float model and its quantized one on the same batches and measures what differs.

One batch at a time is in memory, and what is kept does not grow with the data.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from amct import progress
from amct.report.measuring import Measuring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from amct.pipeline.door import ComparedModel, ModelOutput
    from amct.report.activations import InputStatistics
    from amct.report.measuring import Measured, Metric

logger = logging.getLogger(__name__)


def measure(
    reference: ComparedModel,
    quantized: ComparedModel,
    batches: Iterable[tuple[Any, Any]],
    *,
    statistics: Mapping[str, InputStatistics] | None = None,
    metric: Metric | None = None,
    sample_count: Callable[[Any, Any], int] = lambda _batch, _arguments: 1,
    written: Callable[[Any], ModelOutput] | None = None,
) -> Measured:
    """Run both models on each batch.

    Args:
        reference: The float model.
        quantized: The quantized model.
        batches: Each batch as the data gave it, and as arguments of the models.
        statistics: What is summed up of the float inputs of layers, by their key.
        metric: ``metric(output, batch) -> float``, the mean over one batch.
        sample_count: The number of samples of a batch: its weight in the metric.
        written: Runs a written file of the quantized model; outputs and metric are then measured of the file.

    Raises:
        ArgumentError: A layer's output has different shapes in both models.
        ArgumentTypeError: The metric returns no number.
        CalibrationError: There is no data.
    """
    measuring = Measuring(statistics or {}, metric)
    pairs = _Pairs(quantized.shapes_vary)
    expected_layers: dict[str, list[Tensor]] = {}

    def keep(layer: str, tensor: Tensor) -> None:
        expected_layers.setdefault(layer, []).append(tensor)

    def compare(layer: str, tensor: Tensor) -> None:
        if expected_layers.get(layer):
            for pair in pairs.of(layer, f'the output of layer "{layer}"', expected_layers[layer].pop(0), tensor):
                measuring.layers.add(layer, *pair)

    def add_input(key: str, tensor: Tensor) -> None:
        measuring.inputs[key].add(tensor)

    watch_inputs = add_input if statistics else None
    with (
        reference.watch(outputs=keep, inputs=watch_inputs) as run_reference,
        quantized.watch(outputs=compare) as run_quantized,
    ):
        for batch, arguments in progress.track(batches, "Comparing"):
            expected_layers.clear()
            expected, got = run_reference(arguments), run_quantized(arguments)
            if written is not None:
                got = written(arguments)
            measuring.add(pairs.outputs(expected, got))
            measuring.score(expected.value, got.value, batch, sample_count(batch, arguments))
    return measuring.result()


class _Pairs:
    """Tensors of one name in both models."""

    def __init__(self, shapes_vary: bool) -> None:
        self._shapes_vary = shapes_vary
        self._warned: set[str] = set()

    def of(self, name: str, what: str, expected: Tensor, got: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Both tensors, or nothing where their shapes differ and that is allowed."""
        if expected.shape == got.shape or not self._shapes_vary:
            yield expected, got
        elif name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s has different shapes in both nets, %s and %s; such batches are not compared",
                what,
                list(expected.shape),
                list(got.shape),
            )

    def outputs(self, expected: ModelOutput, got: ModelOutput) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The outputs that both models have, with their name."""
        others: dict[str, list[Tensor]] = {}
        for name, tensor in got.tensors:
            others.setdefault(name, []).append(tensor)
        for name, tensor in expected.tensors:
            if others.get(name):
                for pair in self.of(name, f'output "{name}"', tensor, others[name].pop(0)):
                    yield name, *pair
