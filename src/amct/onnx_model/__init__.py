"""Quantize float ONNX files.

>>> import amct.onnx_model as amct                                  # doctest: +SKIP
>>> quantized = amct.quantize("net.onnx", calibration_batches)      # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/net")                                       # doctest: +SKIP
>>> amct.compare("net.onnx", "out/net_qdq_model.onnx", batches)     # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.config.python_config import QuantConfig
    from amct.config.simple_config import LayerConfig
    from amct.numerics.settings import ArqSettings, HfmgSettings, IfmrSettings
    from amct.onnx_model.comparing import compare, measure
    from amct.onnx_model.door import diagnose, quantize, quantize_to
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.record import Record

__all__ = [
    "ArqSettings",
    "HfmgSettings",
    "IfmrSettings",
    "LayerConfig",
    "QuantConfig",
    "QuantizedModel",
    "Record",
    "compare",
    "diagnose",
    "measure",
    "quantize",
    "quantize_to",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ArqSettings": "amct.numerics.settings",
        "HfmgSettings": "amct.numerics.settings",
        "IfmrSettings": "amct.numerics.settings",
        "LayerConfig": "amct.config.simple_config",
        "QuantConfig": "amct.config.python_config",
        "QuantizedModel": "amct.pipeline.quantized_model",
        "Record": "amct.record",
        "compare": "amct.onnx_model.comparing",
        "measure": "amct.onnx_model.comparing",
        "diagnose": "amct.onnx_model.door",
        "quantize": "amct.onnx_model.door",
        "quantize_to": "amct.onnx_model.door",
    },
)
