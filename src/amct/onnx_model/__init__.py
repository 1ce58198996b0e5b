"""Quantize float ONNX files.

>>> import amct.onnx_model as amct                                  # doctest: +SKIP
>>> quantized = amct.quantize("net.onnx", calibration_batches)      # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/net")                                       # doctest: +SKIP
>>> amct.compare("net.onnx", "out/net_qdq_model.onnx", batches)     # doctest: +SKIP
"""

from __future__ import annotations

from amct.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
