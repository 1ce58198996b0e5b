"""Quantize Caffe models: the engine that runs them, pycaffe's interface, calibration and export.

>>> import amct.caffe as amct                                                      # doctest: +SKIP
>>> quantized = amct.quantize("deploy.prototxt", "net.caffemodel", batches)        # doctest: +SKIP
>>> quantized.save("out/net")                                                      # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.caffe.comparing import compare
    from amct.caffe.door import diagnose, quantize, quantize_to
    from amct.caffe.onnx.graph import export_onnx
    from amct.caffe.ptq.equalization import equalize_model
    from amct.caffe.qat.door import CaffeRetraining, prepare_qat
    from amct.caffe.reporting import report
    from amct.config.python_config import QuantConfig
    from amct.config.simple_config import LayerConfig
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.record import CaffeRecord

__all__ = [
    "CaffeRecord",
    "CaffeRetraining",
    "LayerConfig",
    "QuantConfig",
    "QuantizedModel",
    "compare",
    "diagnose",
    "equalize_model",
    "export_onnx",
    "prepare_qat",
    "quantize",
    "quantize_to",
    "report",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "amct.caffe.comparing": ("compare",),
        "amct.caffe.door": ("diagnose", "quantize", "quantize_to"),
        "amct.caffe.onnx.graph": ("export_onnx",),
        "amct.caffe.ptq.equalization": ("equalize_model",),
        "amct.caffe.qat.door": ("CaffeRetraining", "prepare_qat"),
        "amct.caffe.reporting": ("report",),
        "amct.config.python_config": ("QuantConfig",),
        "amct.config.simple_config": ("LayerConfig",),
        "amct.pipeline.quantized_model": ("QuantizedModel",),
        "amct.record": ("CaffeRecord",),
    },
)
