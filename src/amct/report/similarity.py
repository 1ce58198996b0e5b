"""How alike two runs of a model are, layer by layer: cosine and signal-to-noise ratio, summed up batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """One layer's output in two models, over all data.

    Attributes:
        layer: The layer.
        cosine: Of the angle between both outputs, each seen as one long vector; 1 when both are zero, 0 when one is.
        sqnr: Signal-to-quantization-noise ratio in dB, ``10 log10(Σ x² / Σ (x - y)²)``; infinite when they are equal.
        mean_squared_error: ``Σ (x - y)² / n``.
        largest_error: The largest ``|x - y|``.
        values: How many values were compared.
    """

    layer: str
    cosine: float
    sqnr: float
    mean_squared_error: float
    largest_error: float
    values: int


class Comparison:
    """Sums up the outputs of some layers in constant memory, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def add(self, layer: str, reference: Tensor, other: Tensor) -> None:
        """Take in one batch of a layer's output, from the reference and from the model compared with it.

        Raises:
            ArgumentError: their shapes differ.
        """
        if reference.shape != other.shape:
            raise ArgumentError(
                f'layer "{layer}": outputs of different shapes cannot be compared, '
                f"{list(reference.shape)} and {list(other.shape)}"
            )
        self._sums.setdefault(layer, _Sums()).add(reference.detach().cpu(), other.detach().cpu())

    def layers(self) -> list[LayerComparison]:
        """The comparison of each layer, in the order in which they were first seen."""
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
        x, y = reference.double().reshape(-1), other.double().reshape(-1)
        difference = x - y
        self.product += float(torch.dot(x, y))
        self.reference += float(torch.dot(x, x))
        self.other += float(torch.dot(y, y))
        self.error += float(torch.dot(difference, difference))
        self.largest = max(self.largest, float(difference.abs().max()))
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
