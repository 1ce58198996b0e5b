"""Quantize PyTorch models.

>>> import amct.pytorch as amct                                     # doctest: +SKIP
>>> quantized = amct.quantize(model, calibration_loader)            # doctest: +SKIP
>>> print(quantized.summary())                                      # doctest: +SKIP
>>> quantized.save("out/resnet")                                    # doctest: +SKIP
>>> quantized.report("out/report.html", data=test_loader, metric=top1)  # doctest: +SKIP
"""

from __future__ import annotations

from amct.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
