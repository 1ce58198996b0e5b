"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from amct.pytorch.amct_api import create_quant_config, quantize_model, quantize_preprocess, save_model
from amct.pytorch.retrain_api import (
    create_quant_retrain_config,
    create_quant_retrain_model,
    restore_quant_retrain_model,
    save_quant_retrain_model,
)

__all__ = [
    "create_quant_config",
    "create_quant_retrain_config",
    "create_quant_retrain_model",
    "quantize_model",
    "quantize_preprocess",
    "restore_quant_retrain_model",
    "save_model",
    "save_quant_retrain_model",
]
