"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from amct.pytorch.amct_api import create_quant_config, quantize_model, quantize_preprocess, save_model

__all__ = ["create_quant_config", "quantize_model", "quantize_preprocess", "save_model"]
