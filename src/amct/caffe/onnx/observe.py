"""Observes the blobs between layers that the fast placement of the QDQ file quantizes too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.export.binding import TensorFactors
from amct.numerics.min_max import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.caffe.engine.net import Net


class BlobRanges:
    """Smallest and largest value of some blobs over all forwards: cheap, because none of them feeds a weight."""

    def __init__(self, names: Iterable[str]) -> None:
        self._observers = {name: MinMaxObserver() for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        """The blobs, which a net that frees its blobs must keep (``keep_blobs=ranges.names``)."""
        return tuple(self._observers)

    def observe(self, net: Net) -> None:
        """Take in what the last forward of a net left in its blobs.

        Raises:
            ArgumentError: The net has no such blob, or freed it.
            CalibrationError: A blob holds NaN or infinity.
        """
        for name, observer in self._observers.items():
            observer.observe(net.blob(name).tensor)

    def factors(self) -> dict[str, TensorFactors]:
        """The factors of each blob, for ``quantized_onnx`` and ``<record>.qdq.json``.

        Raises:
            CalibrationError: Nothing was observed.
        """
        results = {name: observer.result() for name, observer in self._observers.items()}
        return {
            name: TensorFactors(scale=float(found.scale), zero_point=int(found.offset))
            for name, found in results.items()
        }
