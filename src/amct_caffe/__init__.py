"""AMCT's names for Caffe models: ``import amct_caffe as amct``. Everything is implemented in ``amct.caffe``."""

from __future__ import annotations

import sys

from amct.caffe.amct_api import (
    activation_quantize_model,
    create_quant_config,
    init,
    set_cpu_mode,
    set_gpu_mode,
    weights_quantize_model,
)
from amct.caffe.ptq.convert import convert_model
from amct.caffe.ptq.save import save_model
from amct.caffe.pycaffe.install import install_as_caffe
from amct.caffe.qat.amct_api import create_quant_retrain_config, create_quant_retrain_model
from amct.caffe.qat.save import save_quant_retrain_model
from amct.caffe.uninplace import uninplace_model

#: ``from amct_caffe import amct``, as in the samples of AMCT's guide.
amct = sys.modules[__name__]

__all__ = [
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
