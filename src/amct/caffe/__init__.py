"""Quantize Caffe models: the engine that runs them, pycaffe's interface, calibration and export.

>>> import amct.caffe as amct                                                      # doctest: +SKIP
>>> quantized = amct.quantize("deploy.prototxt", "net.caffemodel", batches)        # doctest: +SKIP
>>> quantized.save("out/net")                                                      # doctest: +SKIP
"""

from __future__ import annotations

from amct.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
