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
        "amct.config.python_config": ("QuantConfig",),
        "amct.config.simple_config": ("LayerConfig",),
        "amct.numerics.settings": ("ArqSettings", "HfmgSettings", "IfmrSettings"),
        "amct.onnx_model.comparing": ("compare", "measure"),
        "amct.onnx_model.door": ("diagnose", "quantize", "quantize_to"),
        "amct.pipeline.quantized_model": ("QuantizedModel",),
        "amct.record": ("Record",),
    },
)
