"""Repairs a fast QDQ file: tensors between the layers whose quantization costs too much stay float."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.export.check.reference import WORSE
from amct.export.check.running import LoadedModel
from amct.export.check.similarity import similarity_over
from amct.export.onnx.runtime import Runner
from amct.numerics.affine import integer_range

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.export.binding import TensorFactors
    from amct.export.check.outcome import ComparedBatch
    from amct.export.formats import ExportedModel

LONGEST = 60.0
"""CPU seconds after which the search ends with what it has: other work on the machine does not end it sooner."""
_TOKENS = 3


def noisiest_tensors(
    model: ModelProto, tensors: Mapping[str, TensorFactors], inputs: Mapping[str, NDArray[Any]]
) -> list[str]:
    """Tensors in the order of the noise of their own quantization, the noisiest first.

    The noise is that of the mean channel, relative to the channel: a tensor whose steps fit its largest channel only
    has the others rounded to nothing, which its SQNR as a whole does not show.

    Args:
        model: The float model that has these tensors.
        tensors: Their factors.
        inputs: The batch.
    """
    values = Runner(model, tensors, lean=True).run(inputs)
    noise = {name: _noise(values[name].astype(np.float64), factors) for name, factors in tensors.items()}
    return sorted(noise, key=lambda name: -noise[name])


def _noise(values: NDArray[Any], factors: TensorFactors) -> float:
    low, high = integer_range(factors.bits)
    integers = np.clip(np.rint(values / factors.scale) + factors.zero_point, low, high)
    error = (integers - factors.zero_point) * factors.scale - values
    axis = -1 if values.ndim == _TOKENS else min(1, values.ndim - 1)  # [batch, token, channel], or [batch, channel, …]
    others = tuple(place for place in range(values.ndim) if place != axis % max(1, values.ndim))
    signal, lost = (values**2).sum(others), (error**2).sum(others)
    return float(np.mean(np.minimum(1.0, lost / np.maximum(signal, np.finfo(np.float64).tiny))))


class Repair:
    """Finds the fewest tensors that must stay float, so that a file is about as good as without all of them.

    Args:
        export: Exports the file without quantizing the given tensors.
        batches: The batches, with the outputs of the float model.
        wanted: The SQNR of the simulation.
    """

    def __init__(
        self,
        export: Callable[[Collection[str]], ExportedModel],
        batches: Sequence[ComparedBatch],
        wanted: float,
    ) -> None:
        self._export, self._batches, self._wanted = export, batches, wanted

    def run(self, ordered: Sequence[str], before: float) -> tuple[ExportedModel, tuple[str, ...]] | None:
        """The repaired file and the tensors that stay float; None if these tensors are not the cause.

        Args:
            ordered: The tensors that may stay float, the most suspicious first.
            before: The SQNR of the file in which all of them are quantized.
        """
        start = time.process_time()
        best, reached = self._without(ordered)
        if reached - before < (self._wanted - before) / 2:  # most of the loss has another cause
            return None
        goal = min(self._wanted, reached) - WORSE
        low, high = 0, len(ordered)  # ``low`` tensors are not enough, ``high`` are
        count = 1
        while high - low > 1 and time.process_time() - start < LONGEST:
            file, sqnr = self._without(ordered[:count])
            if sqnr >= goal:
                best, high = file, count
            else:
                low = count
            count = 2 * low if 2 * low < high and high == len(ordered) else (low + high) // 2
        return best, tuple(ordered[:high])

    def _without(self, tensors: Sequence[str]) -> tuple[ExportedModel, float]:
        exported = self._export(set(tensors))
        loaded = LoadedModel(exported.model, lean=True)
        similarity, _ = similarity_over((batch.expected, loaded.run(batch.inputs)) for batch in self._batches)
        return exported, similarity.sqnr if similarity is not None else -np.inf
