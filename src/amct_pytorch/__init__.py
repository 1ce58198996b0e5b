"""The names of AMCT for PyTorch: ``import amct_pytorch as amct``. Everything is implemented in ``amct``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.lazy import lazy_names

if TYPE_CHECKING:
    from amct.pytorch.amct_api import create_quant_config, quantize_model, quantize_preprocess, save_model
    from amct.pytorch.auto_calibration import ModelEvaluator, accuracy_based_auto_calibration
    from amct.pytorch.blocks.amct_api import (
        create_distill_config,
        create_distill_model,
        distill,
        save_distill_model,
    )
    from amct.pytorch.kv_cache import QuantCalibrationOp, create_quant_cali_config, create_quant_cali_model
    from amct.pytorch.pruning.amct_api import (
        create_compressed_retrain_model,
        create_prune_retrain_model,
        restore_compressed_retrain_model,
        restore_prune_retrain_model,
        save_compressed_retrain_model,
        save_prune_retrain_model,
    )
    from amct.pytorch.pruning.amct_search import auto_channel_prune_search
    from amct.pytorch.qat.amct_api import (
        create_quant_retrain_config,
        create_quant_retrain_model,
        restore_quant_retrain_model,
        save_quant_retrain_model,
    )
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
    from amct_pytorch import tensor_decompose

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
    "ModelEvaluator",
    "QuantCalibrationOp",
    "accuracy_based_auto_calibration",
    "auto_channel_prune_search",
    "create_compressed_retrain_model",
    "create_distill_config",
    "create_distill_model",
    "create_prune_retrain_model",
    "create_quant_cali_config",
    "create_quant_cali_model",
    "create_quant_config",
    "create_quant_retrain_config",
    "create_quant_retrain_model",
    "distill",
    "quantize_model",
    "quantize_preprocess",
    "restore_compressed_retrain_model",
    "restore_prune_retrain_model",
    "restore_quant_retrain_model",
    "save_compressed_retrain_model",
    "save_distill_model",
    "save_model",
    "save_prune_retrain_model",
    "save_quant_retrain_model",
    "tensor_decompose",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "amct.pytorch.amct_api": ("create_quant_config", "quantize_model", "quantize_preprocess", "save_model"),
        "amct.pytorch.auto_calibration": ("ModelEvaluator", "accuracy_based_auto_calibration"),
        "amct.pytorch.blocks.amct_api": (
            "create_distill_config",
            "create_distill_model",
            "distill",
            "save_distill_model",
        ),
        "amct.pytorch.kv_cache": ("QuantCalibrationOp", "create_quant_cali_config", "create_quant_cali_model"),
        "amct.pytorch.pruning.amct_api": (
            "create_compressed_retrain_model",
            "create_prune_retrain_model",
            "restore_compressed_retrain_model",
            "restore_prune_retrain_model",
            "save_compressed_retrain_model",
            "save_prune_retrain_model",
        ),
        "amct.pytorch.pruning.amct_search": ("auto_channel_prune_search",),
        "amct.pytorch.qat.amct_api": (
            "create_quant_retrain_config",
            "create_quant_retrain_model",
            "restore_quant_retrain_model",
            "save_quant_retrain_model",
        ),
        "amct.pytorch.qat.single_op.layers": (
            "Conv1dQAT",
            "Conv2dQAT",
            "Conv3dQAT",
            "ConvTranspose1dQAT",
            "ConvTranspose2dQAT",
            "LinearQAT",
            "MatMulQAT",
        ),
        "amct.pytorch.qat.single_op.recurrent": ("GRUQAT", "LSTMQAT"),
        "amct_pytorch.tensor_decompose": ("tensor_decompose",),
    },
)
