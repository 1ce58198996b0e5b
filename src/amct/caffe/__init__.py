"""Front door for Caffe models: the engine that runs them, pycaffe's face, quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.ptq.quant_config import QuantConfig
from amct.config.settings import ArqSettings, IfmrSettings, LayerConfig, SnqSettings

if TYPE_CHECKING:
    from amct.caffe.onnx.graph import export_onnx
    from amct.caffe.ptq.equalization import equalize_model
    from amct.caffe.quantized_model import QuantizedCaffeModel, compare, quantize, report

__all__ = [
    "ArqSettings",
    "IfmrSettings",
    "LayerConfig",
    "QuantConfig",
    "QuantizedCaffeModel",
    "SnqSettings",
    "compare",
    "equalize_model",
    "export_onnx",
    "quantize",
    "report",
]


def __getattr__(name: str) -> object:
    """Load the quantizer and the exporter (and torch) only when someone asks for them."""
    if name == "export_onnx":
        from amct.caffe.onnx import graph as onnx_graph

        return onnx_graph.export_onnx
    if name == "equalize_model":
        from amct.caffe.ptq import equalization

        return equalization.equalize_model
    if name in __all__:
        from amct.caffe import quantized_model

        return getattr(quantized_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
