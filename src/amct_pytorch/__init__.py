"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from amct.pytorch.amct_api import create_quant_config, quantize_model, quantize_preprocess, save_model
from amct.pytorch.kv_cache.amct_api import create_quant_cali_config, create_quant_cali_model
from amct.pytorch.kv_cache.calibration_op import QuantCalibrationOp
from amct.pytorch.qat.single_op.layers import (
    Conv1dQAT,
    Conv2dQAT,
    Conv3dQAT,
    ConvTranspose1dQAT,
    ConvTranspose2dQAT,
    LinearQAT,
    MatMulQAT,
)
from amct.pytorch.qat.single_op.recurrent import GRUQAT, LSTMQAT

__all__ = [
    "GRUQAT",
    "LSTMQAT",
    "Conv1dQAT",
    "Conv2dQAT",
    "Conv3dQAT",
    "ConvTranspose1dQAT",
    "ConvTranspose2dQAT",
    "LinearQAT",
    "MatMulQAT",
    "QuantCalibrationOp",
    "create_quant_cali_config",
    "create_quant_cali_model",
    "create_quant_config",
    "quantize_model",
    "quantize_preprocess",
    "save_model",
]
