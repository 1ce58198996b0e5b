"""The files of one save hold the same integers and biases, and these make up for what rounding the weights loses."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.caffe import pycaffe
from amct.numerics.arq import arq
from amct.numerics.rounding import bias_correction, integer_weight
from amct.numerics.settings import WeightKind
from amct.pytorch import ArqSettings, IfmrSettings, LayerConfig, QuantConfig

IMAGES = np.random.default_rng(8).normal(0.4, 1.0, size=(8, 3, 8, 8)).astype(np.float32)
LAYERS = ("conv", "depthwise", "fc")
PROTOTXT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 8 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 6 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "relu" }
layer {
  name: "depthwise" type: "Convolution" bottom: "relu" top: "depthwise"
  convolution_param { num_output: 6 kernel_size: 3 group: 6 }
}
layer { name: "relu2" type: "ReLU" bottom: "depthwise" top: "relu2" }
layer { name: "fc" type: "InnerProduct" bottom: "relu2" top: "fc" inner_product_param { num_output: 5 } }
"""


class Network(nn.Module):
    """A convolution, a depthwise one and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.depthwise = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6)
        self.fc = nn.Linear(96, 5)

    def forward(self, x):
        return self.fc(self.depthwise(self.conv(x).relu()).relu().flatten(1))


class Even(nn.Module):
    """No depthwise convolution, and inputs by twos: weights of four bits can be packed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.depthwise = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc = nn.Linear(128, 5)

    forward = Network.forward


def images(model):
    return np.concatenate([IMAGES, IMAGES[:, :1].copy()], 1) if isinstance(model, Even) else IMAGES


def quantize_torch(folder, config, network=Network):
    del folder
    model = network().eval()
    return amct.pytorch.quantize(model, [torch.from_numpy(images(model))], config)


def quantize_onnx(folder, config, network=Network):
    model = network().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        options = {"dynamo": True, "opset_version": 18, "verbose": False}
        torch.onnx.export(model, (torch.from_numpy(images(model)),), folder / "net.onnx", **options)
    return amct.onnx_model.quantize(folder / "net.onnx", [images(model)], config)


def config(**settings):
    return QuantConfig(common=LayerConfig(**settings))


OTHER_INTEGERS = {
    "16-bit activations": (config(activations=IfmrSettings(num_bits=16)), Network),
    "one scale for all outputs": (config(weights=ArqSettings(channel_wise=False)), Network),
    "4-bit weights": (config(weights=ArqSettings(num_bits=4)), Even),
    "4-bit weights to the nearest": (
        QuantConfig(common=LayerConfig(weights=ArqSettings(num_bits=4)), weight_rounding="nearest"), Even
    ),
}  # fmt: skip


def unpacked(weight):
    """Two 4-bit integers of each byte, the first one in its low half, along the input channels."""
    low, high = ((weight << 4).astype(np.int8) >> 4), weight >> 4
    return np.stack([low, high], 2).reshape(weight.shape[0], -1, *weight.shape[2:])


def caffe_files(folder):
    (folder / "net.prototxt").write_text(PROTOTXT)
    net, model = pycaffe.Net(str(folder / "net.prototxt"), pycaffe.TEST), Network()
    for name in LAYERS:
        layer = model.get_submodule(name)
        net.params[name][0].data[...] = layer.weight.detach().numpy()
        net.params[name][1].data[...] = layer.bias.detach().numpy()
    net.save(str(folder / "net.caffemodel"))
    return str(folder / "net.prototxt"), str(folder / "net.caffemodel")


def stored(file, layers):
    """By layer: the integers of weight and bias in an ONNX file, as [Cout, ...]."""
    model = onnx.load(file)
    arrays = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    arrays |= {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    producers = {name: node for node in model.graph.node for name in node.output}
    nodes = {node.name: node for node in model.graph.node}

    def integers(name):
        while name not in arrays:
            node = producers[name]
            zero = arrays[node.input[2]] if node.op_type == "DequantizeLinear" and len(node.input) > 2 else 0
            if node.op_type == "DequantizeLinear":
                return arrays[node.input[0]].astype(np.int64) - np.asarray(zero, np.int64).reshape(-1)[0]
            name = node.input[0]
        return np.rint(arrays[name]).astype(np.int64)

    found = {}
    for layer in layers:
        node = nodes[layer]
        weight = integers(node.input[1])
        columns = node.op_type == "MatMul" or (node.op_type == "Gemm" and not any(a.i for a in node.attribute))
        bias = node.input[2] if len(node.input) > 2 else None
        if bias is None:  # an Add behind it
            reader = next(other for other in model.graph.node if node.output[0] in other.input)
            bias = next(name for name in reader.input if name != node.output[0])
        found[layer] = weight.T if columns else weight, integers(bias).reshape(-1)
    return found


@pytest.mark.parametrize("quantize", [quantize_torch, quantize_onnx])
def test_deploy_fake_quant_and_qdq_hold_the_same_integers_and_biases(quantize, tmp_path):
    quantized = quantize(tmp_path, None)
    quantized.save(tmp_path / "q", formats=("qdq", "deploy", "fake_quant"), target="exact8", check=False)
    names = quantized.layers
    files = {name: stored(tmp_path / f"q_{name}_model.onnx", names) for name in ("deploy", "fake_quant", "qdq")}
    for layer in names:
        qparams, weights = quantized.qparams[layer], quantized.prepared.weights[layer].weights[0]
        assert qparams.cancels_errors
        weight, bias = files["deploy"][layer]
        for other in ("fake_quant", "qdq"):
            np.testing.assert_array_equal(files[other][layer][0].reshape(weight.shape), weight)
            np.testing.assert_array_equal(files[other][layer][1], bias)
        scale = qparams.weight.scale.reshape(-1, *[1] * (weights.source.tensor.ndim - 1))
        np.testing.assert_array_equal((weights.real() / scale).round().numpy().reshape(weight.shape), weight)
    plain = quantize(tmp_path, amct.pytorch.QuantConfig(bias_correction=False))
    plain.save(tmp_path / "p", formats=("deploy",), check=False)
    without = stored(tmp_path / "p_deploy_model.onnx", names)
    assert any((without[layer][1] != files["deploy"][layer][1]).any() for layer in names)


@pytest.mark.parametrize("quantize", [quantize_torch, quantize_onnx])
@pytest.mark.parametrize(("wanted", "network"), OTHER_INTEGERS.values(), ids=OTHER_INTEGERS)
def test_the_files_agree_with_other_integers_too(quantize, wanted, network, tmp_path):
    quantized = quantize(tmp_path, wanted, network)
    quantized.save(tmp_path / "q", formats=("qdq", "deploy", "fake_quant"), target="exact8", opset=21, check=False)
    names = quantized.layers
    files = {name: stored(tmp_path / f"q_{name}_model.onnx", names) for name in ("deploy", "fake_quant", "qdq")}
    for layer in names:
        weight, bias = files["fake_quant"][layer]
        packed = files["deploy"][layer][0].astype(np.int8)
        in_deploy = unpacked(packed) if quantized.qparams[layer].weight.bits == 4 else packed
        np.testing.assert_array_equal(in_deploy, weight)
        np.testing.assert_array_equal(files["qdq"][layer][0].reshape(weight.shape), weight)
        for other in ("deploy", "qdq"):
            np.testing.assert_array_equal(files[other][layer][1], bias)
        found = quantized.prepared.weights[layer].weights[0].real() / quantized.qparams[layer].weight.scale.reshape(
            -1, *[1] * (weight.ndim - 1)
        )
        np.testing.assert_array_equal(found.round().numpy().reshape(weight.shape), weight)


@pytest.mark.parametrize(
    ("wanted", "network"), [(None, Network), *OTHER_INTEGERS.values()], ids=["defaults", *OTHER_INTEGERS]
)
def test_the_simulation_in_torch_has_the_bias_of_the_files(wanted, network, tmp_path):
    quantized = quantize_torch(tmp_path, wanted, network)
    quantized.save(tmp_path / "q", formats=("deploy",), check=False)
    files = stored(tmp_path / "q_deploy_model.onnx", LAYERS)
    for name in LAYERS:
        qparams = quantized.qparams[name]
        step = qparams.weight.scale.double() * qparams.input.step
        bias = quantized.model.get_submodule(name).bias.detach().double() / step
        np.testing.assert_array_equal(bias.round().long().numpy(), files[name][1])


CAFFE = {
    "defaults": None,
    **{name: OTHER_INTEGERS[name][0] for name in ("16-bit activations", "one scale for all outputs")},
}


@pytest.mark.parametrize("wanted", CAFFE.values(), ids=CAFFE)
def test_the_caffe_pairs_and_the_qdq_file_hold_the_same_integers_and_biases(wanted, tmp_path):
    quantized = amct.caffe.quantize(*caffe_files(tmp_path), [IMAGES], wanted)
    formats = ("qdq", "deploy", "fake_quant")
    quantized.save(tmp_path / "q", formats=formats, placement="exact", target="exact8", opset=21, check=False)
    files = stored(tmp_path / "q_qdq_model.onnx", LAYERS)
    deploy, fake_quant = (
        pycaffe.Net(str(tmp_path / f"q_{pair}_model.prototxt"), str(tmp_path / f"q_{pair}_weights.caffemodel"), 1)
        for pair in ("deploy", "fake_quant")
    )
    for name in LAYERS:
        weight, bias = (np.array(blob.data).astype(np.int64) for blob in deploy.params[name])
        np.testing.assert_array_equal(files[name][0].reshape(weight.shape), weight)
        np.testing.assert_array_equal(files[name][1], bias)
        scale = quantized.qparams[name].weight.scale.double().numpy()
        steps = scale.reshape(-1, *[1] * (weight.ndim - 1)), scale * quantized.qparams[name].input.step
        for own, other, step in zip((weight, bias), fake_quant.params[name], steps, strict=True):  # real numbers
            np.testing.assert_array_equal(np.rint(np.array(other.data) / step).astype(np.int64), own)


def test_a_caffe_config_without_bias_correction_has_other_biases(tmp_path):
    quantized = amct.caffe.quantize(*caffe_files(tmp_path), [IMAGES])
    quantized.save(tmp_path / "q", formats=("qdq",), placement="exact", target="exact8", check=False)
    files = stored(tmp_path / "q_qdq_model.onnx", LAYERS)
    plain = amct.caffe.quantize(*caffe_files(tmp_path), [IMAGES], amct.caffe.QuantConfig(bias_correction=False))
    plain.save(tmp_path / "p", formats=("qdq",), placement="exact", target="exact8", check=False)
    without = stored(tmp_path / "p_qdq_model.onnx", LAYERS)
    assert any((without[name][1] != files[name][1]).any() for name in LAYERS)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("cancel_errors", [False, True])
def test_correction_leaves_no_mean_error_in_any_channel(groups, cancel_errors):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(6, 9 // groups, 1, 1, generator=generator)
    x = torch.randn(64, 9, 2, 2, generator=generator).double() + torch.arange(9).reshape(1, -1, 1, 1)
    qparams = arq(weight, kind=WeightKind.CONV, groups=groups)
    integers = integer_weight(weight, qparams, WeightKind.CONV, groups, cancel_errors=cancel_errors)
    rounded = integers.double() * qparams.scale.double().reshape(-1, 1, 1, 1)
    found = bias_correction(weight, integers, qparams.scale, x.mean((0, 2, 3)), groups)
    convolve = nn.functional.conv2d
    error = convolve(x, weight.double(), groups=groups) - convolve(x, rounded, found, groups=groups)
    assert error.mean((0, 2, 3)).abs().max() < 1e-6
    assert (convolve(x, weight.double(), groups=groups) - convolve(x, rounded, groups=groups)).mean() != 0


FIRST_LAYERS = {
    "convolution": lambda: nn.Conv2d(4, 6, 1),  # every position of a larger kernel sees other values at the edges
    "depthwise": lambda: nn.Conv2d(4, 8, 1, groups=4),
    "linear": lambda: nn.Linear(8, 5),
}


@pytest.mark.parametrize(("kind", "bits"), [("convolution", 8), ("convolution", 4), ("depthwise", 8), ("linear", 4)])
def test_the_integers_of_a_file_leave_no_more_mean_error_than_rounding_the_bias(kind, bits, tmp_path):
    """Of each channel, on the calibration data, in float64: half a step of the bias is all that is left."""
    torch.manual_seed(9)
    layer = FIRST_LAYERS[kind]()
    model, x = nn.Sequential(layer).eval(), torch.from_numpy(images(Even()))
    settings = config(weights=ArqSettings(num_bits=bits))
    quantized = amct.pytorch.quantize(model, [x], settings)
    quantized.save(tmp_path / "q", formats=("fake_quant",), check=False)
    weight, bias = stored(tmp_path / "q_fake_quant_model.onnx", quantized.layers)[quantized.layers[0]]
    qparams = quantized.qparams[quantized.layers[0]]
    scale = qparams.weight.scale.double()
    step = scale * qparams.input.step
    rounded = torch.from_numpy(weight).double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    corrected = torch.from_numpy(bias).double() * step
    with torch.no_grad():
        exact = layer.double()(x.double())
        layer.weight.copy_(rounded.reshape(layer.weight.shape))
        layer.bias.copy_(corrected)
        error = layer(x.double()) - exact
    left = error.movedim(-1 if kind == "linear" else 1, 0).flatten(1).mean(1).abs()
    means = 1e-6 * exact.abs().max()  # the means of the inputs are float32
    assert (left <= 0.5 * step.expand_as(left) + means).all()
