"""Published networks as ONNX files: what is lost, in onnxruntime's integer kernels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_nets import exported
from PIL import Image
from real_models import cifar_images, cifar_resnet, onnx_top1

import amct.onnx_model as amct
from amct.export.onnx.runtimes import count_integer_kernels

pytestmark = pytest.mark.assets


def test_resnet20_keeps_its_accuracy(assets, tmp_path):
    images, labels = cifar_images(assets, "test_6000", 1500)
    calibration, _ = cifar_images(assets, "train_10000", 200)
    onnx.save(exported(cifar_resnet(assets, 20), calibration[:2]), tmp_path / "float.onnx")
    quantized = amct.quantize(tmp_path / "float.onnx", list(calibration.split(50)))
    assert len(quantized.prepared.folded_layers) == 19
    quantized.save(tmp_path / "q", formats="qdq")
    assert count_integer_kernels(tmp_path / "q_qdq_model.onnx").share == 1
    before, after = (onnx_top1(tmp_path / name, images, labels) for name in ("float.onnx", "q_qdq_model.onnx"))
    print(f"ResNet-20: {before:.2f} % float, {after:.2f} % INT8")
    assert before > 90
    assert after >= before - 0.3


def test_a_published_onnx_file_of_an_old_opset(assets, tmp_path):
    """RFB-320 has opset 9, nameless nodes, weights among its inputs and a fixed batch of 1."""
    file = assets / "ultralight_face" / "version-RFB-320.onnx"
    photos = [Image.open(path) for path in sorted((assets / "face_images").glob("*.jpg"))[:2]]
    pixels = [np.asarray(photo.convert("RGB").resize((320, 240)), np.float32) for photo in photos]
    data = [((each - 127) / 128).transpose(2, 0, 1)[np.newaxis] for each in pixels]
    quantized = amct.quantize(file, data)
    quantized.save(tmp_path / "q", formats="qdq")
    kernels = count_integer_kernels(tmp_path / "q_qdq_model.onnx")
    assert (kernels.integer, kernels.total) == (52, 52)
    measured = amct.measure(file, tmp_path / "q_qdq_model.onnx", data)
    for output in measured.outputs:
        print(f"RFB-320 {output.layer}: cosine {output.cosine:.6f}, SQNR {output.sqnr:.1f} dB")
        assert output.cosine > 0.9995
    assert len(measured.layers) == 52
