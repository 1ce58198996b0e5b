"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.pytorch.amct_api import create_quant_config, quantize_model, quantize_preprocess, save_model

__all__ = [
    "create_quant_config",
    "quantize_model",
    "quantize_preprocess",
    "save_model",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "create_quant_config": "amct.pytorch.amct_api",
        "quantize_model": "amct.pytorch.amct_api",
        "quantize_preprocess": "amct.pytorch.amct_api",
        "save_model": "amct.pytorch.amct_api",
    },
)
