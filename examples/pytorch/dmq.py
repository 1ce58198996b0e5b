"""DMQ: balance channels of very different size between activations and weights: ``python examples/pytorch/dmq.py``."""

from __future__ import annotations

import torch
from shared import OUTPUT, accuracy, calibration_batches, in_onnxruntime, train
from torch import nn

import amct_pytorch as amct

CONFIGS = {"without": "", "with": "common_config { dmq_balancer { migration_strength: 0.5 } }"}
OUTLIER = 400.0


def trained_perceptron() -> nn.Module:
    """A network with one huge channel behind its LayerNorm, as transformers have; it computes the same as without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
    train(model, model, epochs=8)
    with torch.no_grad():
        model[3].weight[0] *= OUTLIER
        model[3].bias[0] *= OUTLIER
        model[4].weight[:, 0] /= OUTLIER
    return model


def quantized_accuracy(model: nn.Module, name: str) -> float:
    """AMCT's functions with a simple config; ``quantize_preprocess`` and one forward find the balance factors."""
    files = [OUTPUT / f"dmq_{name}{ending}" for ending in (".cfg", ".json", "_record.txt", "_modified.onnx")]
    simple, config, record, modified = files
    OUTPUT.mkdir(parents=True, exist_ok=True)
    simple.write_text(f"batch_num: 2 {CONFIGS[name]}")
    batches = calibration_batches()
    amct.create_quant_config(config, model, batches[0], config_defination=simple)
    if "dmq" in CONFIGS[name]:
        amct.quantize_preprocess(config, record, model, batches[0])(torch.cat(batches))
    names = {"input_names": ["image"], "dynamic_axes": {"image": {0: "batch"}}}
    calibrating = amct.quantize_model(config, modified, record, model, batches[0], **names)
    for batch in batches:
        calibrating(batch)
    amct.save_model(modified, record, OUTPUT / f"dmq_{name}")
    return accuracy(in_onnxruntime(OUTPUT / f"dmq_{name}_fake_quant_model.onnx"))


if __name__ == "__main__":
    perceptron = trained_perceptron()
    print(f"float                {accuracy(perceptron):6.2f} %")
    print(f"INT8 without DMQ     {quantized_accuracy(perceptron, 'without'):6.2f} %")
    print(f"INT8 with DMQ        {quantized_accuracy(perceptron, 'with'):6.2f} %")
