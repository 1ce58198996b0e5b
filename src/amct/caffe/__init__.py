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
        "CaffeRecord": "amct.record",
        "CaffeRetraining": "amct.caffe.qat.door",
        "LayerConfig": "amct.config.simple_config",
        "QuantConfig": "amct.config.python_config",
        "QuantizedModel": "amct.pipeline.quantized_model",
        "compare": "amct.caffe.comparing",
        "equalize_model": "amct.caffe.ptq.equalization",
        "export_onnx": "amct.caffe.onnx.graph",
        "prepare_qat": "amct.caffe.qat.door",
        "diagnose": "amct.caffe.door",
        "quantize": "amct.caffe.door",
        "quantize_to": "amct.caffe.door",
        "report": "amct.caffe.reporting",
    },
)
