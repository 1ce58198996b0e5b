"""MVN's gradient is Caffe's own formula, and Dropout keeps its factor at inference where training does not divide."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import amct.caffe
from amct.errors import ModelError
from amct_caffe import caffe

MVN = """
force_backward: true
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 5 } } }
layer { name: "mvn" type: "MVN" bottom: "data" top: "mvn" mvn_param { %s } }
"""
DROPOUT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 8 } } }
layer { name: "f1" type: "InnerProduct" bottom: "data" top: "f1"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "f1" top: "f1" dropout_param { dropout_ratio: 0.75 %s } }
layer { name: "f2" type: "InnerProduct" bottom: "f1" top: "f2"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
"""


def gradient(options, values, top_diff, tmp_path):
    (tmp_path / "mvn.prototxt").write_text(MVN % options)
    net = caffe.Net(str(tmp_path / "mvn.prototxt"), caffe.TRAIN)
    net.blobs["data"].data[...] = values
    net.forward()
    net.blobs["mvn"].diff[...] = top_diff
    net.backward()
    return net.blobs["data"].diff.copy()


@pytest.mark.parametrize("across", [False, True], ids=["by channel", "across channels"])
def test_the_gradient_of_mvn_is_caffes(across, tmp_path):
    random = np.random.default_rng(3)
    values, diff = random.normal(size=(2, 2, 3, 4, 5))
    got = gradient(f"across_channels: {str(across).lower()} eps: 0.05", values, diff, tmp_path)
    rows = (2, -1) if across else (6, -1)
    x, dy = values.astype(np.float64).reshape(rows), diff.reshape(rows)
    std = x.std(1, keepdims=True) + 0.05
    y = (x - x.mean(1, keepdims=True)) / std
    expected = (dy - dy.mean(1, keepdims=True) - y * (y * dy).mean(1, keepdims=True)) / std
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_mvn_is_finite_on_a_constant_image(tmp_path):
    diff = np.random.default_rng(4).normal(size=(2, 3, 4, 5))
    got = gradient("eps: 1e-3", np.ones((2, 3, 4, 5)), diff, tmp_path)
    rows = diff.reshape(6, -1)
    expected = (rows - rows.mean(1, keepdims=True)) / 1e-3
    np.testing.assert_allclose(got.reshape(6, -1), expected, rtol=1e-3)


@pytest.mark.parametrize("option", ["", "scale_train: false"])
def test_dropout_has_its_factor_in_every_file(option, tmp_path):
    files = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    files[0].write_text(DROPOUT % option)
    net = caffe.Net(str(files[0]), caffe.TEST)
    net.save(str(files[1]))
    x = np.random.default_rng(5).normal(size=(2, 8)).astype(np.float32)
    expected = net.forward(data=x)["f2"].copy()
    amct.caffe.export_onnx(*files, tmp_path / "net.onnx")
    got = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"data": x})[0]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    quantized = amct.caffe.quantize(*files, [x])
    quantized.save(tmp_path / "q")
    session = onnxruntime.InferenceSession(tmp_path / "q_qdq_model.onnx")
    # Two layers of 8-bit data and 7-bit weights: a few percent of the largest value at most.
    assert np.abs(session.run(None, {"data": x})[0] - expected).max() < 0.05 * np.abs(expected).max()
    assert np.abs(quantized(x, deploy=True)["f2"] - expected).max() < 0.05 * np.abs(expected).max()


def test_a_batch_norm_without_channels_is_an_error_that_names_the_layer(tmp_path):
    text = """
    force_backward: true
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 3 dim: 0 dim: 4 dim: 4 } } }
    layer { name: "bn" type: "BatchNorm" bottom: "x" top: "y" batch_norm_param { use_global_stats: false } }
    """
    (tmp_path / "bn.prototxt").write_text(text)
    net = caffe.Net(str(tmp_path / "bn.prototxt"), caffe.TEST)
    with pytest.raises(ModelError, match=r'"bn".*cannot run on its bottoms \[\(3, 0, 4, 4\)\]'):
        net.forward()
