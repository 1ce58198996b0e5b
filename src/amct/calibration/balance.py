"""Collects the largest activation of every input channel, batch by batch, for DMQ's balance factors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from amct.errors import AmctError, CalibrationError
from amct.numerics.dmq import activation_maximum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor


class BalanceSession:
    """Accumulates the maximum of every input channel of some layers over all batches.

    Args:
        layers: The names of the layers.
        on_batch: Called after each batch with the maxima of the layers that have been executed so far.
    """

    def __init__(self, layers: Iterable[str], on_batch: Callable[[Mapping[str, Tensor]], None]) -> None:
        self._layers = frozenset(layers)
        self._on_batch = on_batch
        self._maxima: dict[str, Tensor] = {}
        self._depth = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Enclose one forward pass; calls may be nested, and the outermost one ends the batch."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and self._maxima:
            self._on_batch(dict(self._maxima))

    def observe(self, layer: str, x: Tensor, channel_axis: int) -> None:
        """Add the input of a layer.

        Raises:
            CalibrationError: It is empty, or contains NaN or infinity; the message names the layer.
        """
        assert layer in self._layers
        try:
            found = activation_maximum(x, channel_axis).cpu()
            if not bool(torch.isfinite(found).all()):
                raise CalibrationError(
                    "the activation holds NaN or infinite values; look for a diverged layer or broken input data"
                )
        except AmctError as error:
            raise CalibrationError(f'layer "{layer}": {error}') from error
        before = self._maxima.get(layer)
        self._maxima[layer] = found if before is None else torch.maximum(before, found)
