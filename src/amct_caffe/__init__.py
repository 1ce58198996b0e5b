"""AMCT's names for Caffe models: ``import amct_caffe as amct``. Everything is implemented in ``amct.caffe``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.caffe.amct_api import (
        activation_quantize_model,
        create_quant_config,
        init,
        set_cpu_mode,
        set_gpu_mode,
        weights_quantize_model,
    )
    from amct.caffe.auto_calibration import accuracy_based_auto_calibration
    from amct.caffe.prototxt import uninplace_model
    from amct.caffe.ptq.convert import convert_model
    from amct.caffe.ptq.save import save_model
    from amct.caffe.pycaffe.runtime import install_as_caffe
    from amct.caffe.qat.amct_api import (
        create_quant_retrain_config,
        create_quant_retrain_model,
        save_quant_retrain_model,
    )

#: ``from amct_caffe import amct``, as in the samples of AMCT's guide.
amct = sys.modules[__name__]

__all__ = [
    "accuracy_based_auto_calibration",
    "activation_quantize_model",
    "amct",
    "convert_model",
    "create_quant_config",
    "create_quant_retrain_config",
    "create_quant_retrain_model",
    "init",
    "install_as_caffe",
    "save_model",
    "save_quant_retrain_model",
    "set_cpu_mode",
    "set_gpu_mode",
    "uninplace_model",
    "weights_quantize_model",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "amct.caffe.amct_api": (
            "activation_quantize_model",
            "create_quant_config",
            "init",
            "set_cpu_mode",
            "set_gpu_mode",
            "weights_quantize_model",
        ),
        "amct.caffe.auto_calibration": ("accuracy_based_auto_calibration",),
        "amct.caffe.prototxt": ("uninplace_model",),
        "amct.caffe.ptq.convert": ("convert_model",),
        "amct.caffe.ptq.save": ("save_model",),
        "amct.caffe.pycaffe.runtime": ("install_as_caffe",),
        "amct.caffe.qat.amct_api": (
            "create_quant_retrain_config",
            "create_quant_retrain_model",
            "save_quant_retrain_model",
        ),
    },
)
