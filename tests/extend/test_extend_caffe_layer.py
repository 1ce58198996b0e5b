"""Another package adds Caffe layers through ``amct.extend`` alone: they run, export, are quantized and deployed."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import onnxruntime
import pytest

import amct_caffe
from amct import caffe
from amct.caffe import pycaffe
from amct.errors import ArgumentError, ParseError, UnsupportedLayerError
from amct.extend import CaffeLayer, OnnxPlace, register_caffe_layer, unregister_caffe_layer

NET = """
name: "toy"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "soft" type: "SoftSign" bottom: "conv" top: "soft" soft_sign_param { width: 0.5 } }
layer { name: "mirror" type: "Mirror" bottom: "soft" top: "mirror" }
layer { name: "fc" type: "InnerProduct" bottom: "mirror" top: "fc"
  inner_product_param { num_output: 5 weight_filler { type: "gaussian" std: 0.3 } } }
"""


@dataclass(frozen=True)
class SoftSignParameters:
    """``soft_sign_param { ... }`` of a prototxt."""

    width: float = 1.0


class SoftSign(CaffeLayer):
    """x / (width + |x|)."""

    def setup(self, bottoms):
        del bottoms
        self.width = self.parameter.soft_sign_param.width
        if self.width <= 0:
            raise self.error(f"soft_sign_param: width must be > 0, got {self.width:g}")

    def reshape(self, bottoms):
        return [bottoms[0]]

    def forward(self, bottoms, parameters):
        del parameters
        return [bottoms[0] / (self.width + bottoms[0].abs())]

    def to_onnx(self, place: OnnxPlace):
        size = place.step("size", "Abs", place.bottom)
        place.top("Div", place.bottom, place.step("sum", "Add", size, place.value("width", self.width)))


class Mirror(CaffeLayer):
    """Left becomes right: values are only moved, so that a deploy model moves integers."""

    moves_values = True

    def reshape(self, bottoms):
        return [bottoms[0]]

    def forward(self, bottoms, parameters):
        del parameters
        return [bottoms[0].flip(-1)]

    def to_onnx(self, place: OnnxPlace):
        ends = [place.value(name, [value]) for name, value in (("start", -1), ("end", -(2**31)), ("axis", 3))]
        place.top("Slice", place.bottom, *ends, place.value("step", [-1]))


@pytest.fixture
def files(tmp_path):
    register_caffe_layer("SoftSign", parameters=SoftSignParameters)(SoftSign)
    register_caffe_layer("Mirror")(Mirror)
    try:
        (tmp_path / "net.prototxt").write_text(NET)
        pycaffe.set_random_seed(3)
        pycaffe.Net(str(tmp_path / "net.prototxt"), pycaffe.TEST).save(str(tmp_path / "net.caffemodel"))
        yield tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    finally:
        unregister_caffe_layer("SoftSign")
        unregister_caffe_layer("Mirror")


def data(seed):
    return np.random.default_rng(seed).standard_normal((2, 3, 8, 8)).astype(np.float32)


def run(files, x, blob="fc"):
    net = pycaffe.Net(*map(str, files), pycaffe.TEST)
    net.forward(data=x)
    return net.blobs[blob].data.copy(), net


def run_onnx(path, x):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["fc"], {"data": x})[0]


def test_the_layers_run(files):
    _, net = run(files, data(0))
    conv = net.blobs["conv"].data
    np.testing.assert_allclose(net.blobs["soft"].data, conv / (0.5 + np.abs(conv)), rtol=1e-6)
    np.testing.assert_array_equal(net.blobs["mirror"].data, net.blobs["soft"].data[..., ::-1])


def test_the_layers_are_exported(files, tmp_path):
    caffe.export_onnx(*files, tmp_path / "net.onnx")
    np.testing.assert_allclose(run_onnx(tmp_path / "net.onnx", data(0)), run(files, data(0))[0], rtol=1e-4, atol=1e-5)


def test_configs_list_the_layers(files, tmp_path):
    amct_caffe.create_quant_config(tmp_path / "config.json", *files)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["soft"]["quant_enable"] is True
    assert "activation_quant_params" in config["mirror"]
    assert "weight_quant_params" not in config["soft"]


def test_a_layer_may_be_off_by_default_or_not_quantizable(files, tmp_path):
    unregister_caffe_layer("Mirror")
    register_caffe_layer("Mirror", on_by_default=False)(Mirror)
    amct_caffe.create_quant_config(tmp_path / "config.json", *files)
    assert json.loads((tmp_path / "config.json").read_text())["mirror"]["quant_enable"] is False
    unregister_caffe_layer("Mirror")
    register_caffe_layer("Mirror", quantizable=False)(Mirror)
    amct_caffe.create_quant_config(tmp_path / "config.json", *files)
    assert "mirror" not in json.loads((tmp_path / "config.json").read_text())


def test_the_layers_are_quantized_and_deployed(files, tmp_path):
    model = caffe.quantize(*files, [data(seed) for seed in range(4)])
    assert {"soft", "mirror"} <= set(model.layers)
    model.save(tmp_path / "out")
    exact = run(files, data(9))[0]
    for kind in ("fake_quant", "deploy"):
        pair = (tmp_path / f"out_{kind}_model.prototxt", tmp_path / f"out_{kind}_weights.caffemodel")
        found, net = run(pair, data(9))
        assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()
    integers = net.blobs["mirror_quantized"].data  # of the deploy model: moved as integers, not turned into floats
    np.testing.assert_array_equal(integers, np.rint(integers))
    np.testing.assert_array_equal(integers, net.blobs["mirror_quant"].data[..., ::-1])
    soft = net.blobs["soft_quantized"].data
    assert not np.array_equal(soft, np.rint(soft))
    qdq = run_onnx(tmp_path / "out_qdq_model.onnx", data(9))
    assert np.abs(qdq - exact).max() < 0.05 * np.abs(exact).max()


def test_mistakes(files):
    text = files[0].read_text()
    files[0].write_text(text.replace("width: 0.5", "widht: 0.5"))
    with pytest.raises(ParseError, match="widht"):
        pycaffe.Net(str(files[0]), pycaffe.TEST)
    files[0].write_text(text.replace("width: 0.5", "width: -1"))
    with pytest.raises(Exception, match=r'layer "soft" \(SoftSign\): soft_sign_param: width must be > 0, got -1'):
        pycaffe.Net(str(files[0]), pycaffe.TEST)
    with pytest.raises(ArgumentError, match='layer type "ReLU" is registered already'):
        register_caffe_layer("ReLU")(Mirror)
    with pytest.raises(ArgumentError, match="pooling_param"):
        register_caffe_layer("pooling", parameters=SoftSignParameters)(Mirror)


def test_an_unregistered_layer_is_unknown(files):
    unregister_caffe_layer("Mirror")
    try:
        with pytest.raises(UnsupportedLayerError, match='Unknown layer type: "Mirror"'):
            pycaffe.Net(str(files[0]), pycaffe.TEST)
    finally:
        register_caffe_layer("Mirror")(Mirror)
