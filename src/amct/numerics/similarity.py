"""Similarity of the layer outputs of two models: cosine and SQNR, accumulated over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.errors import ArgumentError
from amct.numerics.counts.compiled import compiled_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_CHUNK = 1 << 14
"""Values whose differences stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """The comparison of one layer's output ``x`` in the reference model and ``y`` in the other, over all data.

    Attributes:
        layer: The name of the layer.
        cosine: The cosine similarity of both outputs as flat vectors; 1 if both are zero, 0 if one of them is.
        sqnr: Signal-to-quantization-noise ratio in dB, ``10 log10(Σ x² / Σ (x - y)²)``; infinite if they are equal.
        mean_squared_error: ``Σ (x - y)² / n``.
        largest_error: The largest ``|x - y|``.
        values: The number of values compared.
    """

    layer: str
    cosine: float
    sqnr: float
    mean_squared_error: float
    largest_error: float
    values: int


class Comparison:
    """Accumulates the comparison of layer outputs in constant memory, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def add(self, layer: str, reference: Tensor, other: Tensor) -> None:
        """Add one batch of a layer's output in the reference model and in the other model.

        Raises:
            ArgumentError: The shapes differ.
        """
        if reference.shape != other.shape:
            raise ArgumentError(
                f'layer "{layer}": outputs of different shapes cannot be compared, '
                f"{list(reference.shape)} and {list(other.shape)}"
            )
        self._sums.setdefault(layer, _Sums()).add(reference.detach().cpu(), other.detach().cpu())

    def layers(self) -> list[LayerComparison]:
        """Return the comparison of each layer, in the order in which the layers were first added."""
        return [sums.result(layer) for layer, sums in self._sums.items()]


@dataclass
class _Sums:
    product: float = 0.0
    reference: float = 0.0
    other: float = 0.0
    error: float = 0.0
    largest: float = 0.0
    values: int = 0

    def add(self, reference: Tensor, other: Tensor) -> None:
        if reference.numel() == 0:
            return
        x, y = (each.reshape(-1).contiguous() for each in (reference, other))
        if x.dtype != torch.float32 or y.dtype != torch.float32:
            x, y = x.double(), y.double()
        product, own, others, error, largest = _sums_of(x.numpy(), y.numpy())
        self.product += product
        self.reference += own
        self.other += others
        self.error += error
        self.largest = max(self.largest, float(np.int64(largest).view(np.float64)))
        self.values += x.numel()

    def result(self, layer: str) -> LayerComparison:
        return LayerComparison(
            layer=layer,
            cosine=self._cosine(),
            sqnr=self._sqnr(),
            mean_squared_error=self.error / max(self.values, 1),
            largest_error=self.largest,
            values=self.values,
        )

    def _cosine(self) -> float:
        if self.reference == 0 or self.other == 0:
            return 1.0 if self.reference == self.other else 0.0
        return min(1.0, max(-1.0, self.product / math.sqrt(self.reference * self.other)))

    def _sqnr(self) -> float:
        if self.error == 0:
            return math.inf
        return 10 * math.log10(self.reference / self.error) if self.reference > 0 else -math.inf


@compiled_sum
def _sums_of(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float, float, float, int]:
    """Return Σ x·y, Σ x², Σ y², Σ (x - y)² in float64, and the bits of the largest |x - y|.

    Positive floats are ordered like their bits, and only maxima of integers are vectorized.
    """
    product = own = others = errors = 0.0
    largest = np.int64(0)
    distance = np.empty(min(_CHUNK, x.size))
    for begin in range(0, x.size, _CHUNK):
        left, right = x[begin : begin + _CHUNK], y[begin : begin + _CHUNK]
        for place in range(left.size):
            a, b = np.float64(left[place]), np.float64(right[place])
            product += a * b
            own += a * a
            others += b * b
            errors += (a - b) * (a - b)
            distance[place] = abs(a - b)
        bits = distance[: left.size].view(np.int64)
        for place in range(bits.size):
            largest = max(largest, bits[place])
    return product, own, others, errors, largest
