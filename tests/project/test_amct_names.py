"""The public names of AMCT for PyTorch: each is there, or an error and a page say what to use in its place."""

from __future__ import annotations

import importlib
import inspect

import pytest

import amct_pytorch

_NAMES = """
create_quant_config quantize_preprocess quantize_model save_model
create_quant_retrain_config create_quant_retrain_model restore_quant_retrain_model save_quant_retrain_model
create_prune_retrain_model restore_prune_retrain_model save_prune_retrain_model
create_compressed_retrain_model restore_compressed_retrain_model save_compressed_retrain_model
accuracy_based_auto_calibration auto_channel_prune_search tensor_decompose ModelEvaluator
create_distill_config create_distill_model distill save_distill_model create_quant_cali_config create_quant_cali_model
Conv1dQAT Conv2dQAT Conv3dQAT ConvTranspose1dQAT ConvTranspose2dQAT LinearQAT LSTMQAT GRUQAT MatMulQAT
QuantCalibrationOp
"""
MODULES = {
    "conv2d": "Conv2dQAT",
    "conv3d": "Conv3dQAT",
    "conv_transpose_2d": "ConvTranspose2dQAT",
    "linear": "LinearQAT",
    "quant_calibration_op": "QuantCalibrationOp",
}


@pytest.mark.parametrize("name", _NAMES.split())
def test_a_name_is_there(name):
    assert name in amct_pytorch.__all__
    found = getattr(amct_pytorch, name)
    assert callable(found) or inspect.ismodule(found)


@pytest.mark.parametrize("module", MODULES)
def test_documented_import_paths_of_single_modules(module):
    found = importlib.import_module(f"amct_pytorch.nn.module.quantization.{module}")
    assert getattr(found, MODULES[module]) is getattr(amct_pytorch, MODULES[module])
