"""Files of NVIDIA's, Intel's and OpenCV's Caffe, other names of layers, and messages that name the line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ptq_caffe_flow import cosine

import amct.caffe
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.wire import layer_parts, length_delimited, read_weights, varint
from amct.errors import ModelError, ParseError

INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 11 dim: 9 } } }\n'
CONVOLUTION = """layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def write(text):
    Path("net.prototxt").write_text(text)


def build(text):
    """A net of this text, and its two files."""
    write(text)
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.save("net.caffemodel")
    return net


def assert_quantized(net, weights="net.caffemodel"):
    data = values(1, 3, 11, 9)
    quantized = amct.caffe.quantize("net.prototxt", weights, [data])
    assert quantized.layers == ("conv",)
    assert cosine(quantized(data)["conv"], net.forward(data=data)["conv"]) > 0.999
    return quantized


def test_fields_that_only_say_how_something_is_computed_change_nothing_and_are_not_written():
    layer = CONVOLUTION.replace("num_output", "engine: MKLDNN cudnn_convolution_algo_seeker: FINDEX num_output")
    layer = layer.replace('top: "conv"', 'top: "conv" forward_type: FLOAT backward_math: FLOAT16')
    head = "default_forward_type: FLOAT16 default_backward_math: FLOAT global_grad_scale: 1000 engine: 'MKL2017'\n"
    quantized = assert_quantized(build(head + INPUT + layer))
    quantized.save("out/net", ("fake_quant",), check=False)
    text = Path("out/net_fake_quant_model.prototxt").read_text()
    assert not [word for word in ("FLOAT16", "FINDEX", "global_grad_scale", "MKL2017", "_math") if word in text]


def rewrite_as_raw(dtype, number):
    """Write raw.caffemodel as NVIDIA's Caffe and OpenCV do: blobs are bytes, with the type of their numbers."""
    stored = read_weights(Path("net.caffemodel").read_bytes(), "net.caffemodel")
    parts = []
    for layer in stored:
        name, blobs = layer.name.encode(), []
        for blob in layer.blobs:
            content = blob.values.astype(dtype).tobytes()
            dims = b"".join(varint(size) for size in blob.shape)
            shape = length_delimited(1, len(dims)) + dims
            kind = varint(10 << 3) + varint(number)
            blobs.append([length_delimited(7, len(shape)), shape, kind, length_delimited(12, len(content)), content])
        parts += layer_parts(length_delimited(1, len(name)) + name, blobs)
    Path("raw.caffemodel").write_bytes(b"".join(bytes(part) for part in parts))


@pytest.mark.parametrize(("dtype", "number"), [("<f8", 0), ("<f4", 1), ("<f2", 2)])
def test_weights_stored_as_raw_bytes_are_read(dtype, number):
    net = build(INPUT + CONVOLUTION)
    rewrite_as_raw(dtype, number)
    again = caffe.Net("net.prototxt", "raw.caffemodel", caffe.TEST)
    for blob, other in zip(net.params["conv"], again.params["conv"], strict=True):
        np.testing.assert_array_equal(other.data, blob.data.astype(dtype).astype(np.float32))
    assert_quantized(net, "raw.caffemodel")


def test_raw_bytes_of_an_unknown_type_are_an_error_that_says_which():
    build(INPUT + CONVOLUTION)
    rewrite_as_raw("<i4", 3)
    with pytest.raises(ParseError, match=r"raw.caffemodel: .*raw_data of type 3, expected 0 \(double\)"):
        caffe.Net("net.prototxt", "raw.caffemodel", caffe.TEST)


@pytest.mark.parametrize("name", ["DepthwiseConvolution", "ConvolutionDepthwise", "DepthwiseConv"])
def test_a_depthwise_convolution_is_quantized_under_each_of_its_names(name):
    layer = CONVOLUTION.replace("Convolution", name, 1).replace("num_output: 4", "num_output: 3")
    assert_quantized(build(INPUT + layer))


def test_an_upsample_layer_in_the_v1_format_is_read():
    write(
        "input: 'data' input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8\n"
        "layers { name: 'pool' type: POOLING bottom: 'data' top: 'pool' top: 'mask'"
        " pooling_param { pool: MAX kernel_size: 2 stride: 2 } }\n"
        "layers { name: 'up' type: UPSAMPLE bottom: 'pool' bottom: 'mask' top: 'up' upsample_param { scale: 2 } }\n"
    )
    net = caffe.Net("net.prototxt", caffe.TEST)
    data = values(1, 3, 8, 8)
    up = net.forward(data=data)["up"]
    assert np.count_nonzero(up) == data.size / 4
    np.testing.assert_array_equal(up[up != 0], data[up != 0])


def test_a_single_bottom_is_multiplied_by_its_coefficient():
    data = values(1, 3, 4, 4)
    net = build(INPUT + 'layer { name: "e" type: "Eltwise" bottom: "data" top: "e" eltwise_param { coeff: -10 } }\n')
    net.blobs["data"].reshape(1, 3, 4, 4)
    np.testing.assert_allclose(net.forward(data=data)["e"], -10 * data, rtol=1e-6)


def test_an_error_of_a_layer_says_in_which_line_of_the_prototxt_it_is():
    write(INPUT + CONVOLUTION + 'layer { name: "act" type: "Gelu" bottom: "conv" top: "act" }\n')
    with pytest.raises(ModelError, match=r'^net\.prototxt:4:1: layer "act" \(Gelu\): Unknown layer type'):
        caffe.Net("net.prototxt", caffe.TEST)
    build(INPUT + CONVOLUTION)
    write(INPUT + CONVOLUTION.replace("pad: 1", "pad: 1 stride: 1 group: 2"))
    with pytest.raises(ModelError, match=r'^net\.prototxt:2:1: layer "conv" \(Convolution\): group 2 does not divide'):
        amct.caffe.quantize("net.prototxt", "net.caffemodel", [values(1, 3, 11, 9)])
    with pytest.raises(ModelError, match=r'^net\.prototxt:2:1: layer "conv" \(Convolution\): group 2 does not divide'):
        amct.caffe.export_onnx("net.prototxt", "net.caffemodel", "net.onnx")


def test_a_layer_that_is_not_folded_has_its_reason_once():
    norm = 'layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn" }\n'
    net = build(INPUT + norm + CONVOLUTION.replace('bottom: "data"', 'bottom: "bn"'))
    net.params["bn"][1].data[...] = net.params["bn"][2].data[...] = 1
    net.save("net.caffemodel")
    skipped = amct.caffe.quantize("net.prototxt", "net.caffemodel", [values(1, 3, 11, 9)]).skipped
    reasons = [skip.reason for skip in skipped if skip.layer == "bn"]
    assert reasons
    assert not [reason for reason in reasons if "not folded: not folded" in reason]
    assert len(set(reasons)) == len(reasons)
