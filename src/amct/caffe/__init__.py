"""Front door for Caffe models: the engine that runs them, pycaffe's face, quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct.caffe.quantized_model import QuantizedCaffeModel, quantize

__all__ = ["QuantizedCaffeModel", "quantize"]


def __getattr__(name: str) -> object:
    """Load the quantizer (and torch) only when someone asks for it."""
    if name in __all__:
        from amct.caffe import quantized_model

        return getattr(quantized_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
