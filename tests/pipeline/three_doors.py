"""One small network as a torch module, as a Caffe pair and as an ONNX file, with the same weights."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

import amct.caffe.pycaffe as caffe

EPSILON = 1e-5
LAYERS = ("conv1", "depthwise", "pointwise", "branch", "fc")


class Network(nn.Module):
    """Conv + BN + ReLU, depthwise, residual Add, Concat, pooling, Linear."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8, eps=EPSILON)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.bn2 = nn.BatchNorm2d(8, eps=EPSILON)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.branch = nn.Conv2d(8, 4, 3, padding=1)
        self.fc = nn.Linear(12 * 4 * 4, 5)

    def forward(self, data):
        stem = functional.relu(self.bn1(self.conv1(data)))
        deep = self.pointwise(functional.relu(self.bn2(self.depthwise(stem))))
        residual = functional.relu(stem + deep)
        joined = torch.cat([residual, self.branch(residual)], 1)
        pooled = functional.max_pool2d(joined, 2, 2)
        return self.fc(torch.flatten(pooled, 1))


def torch_network():
    generator = torch.Generator().manual_seed(11)
    model = Network().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("running_var", "bn1.weight", "bn2.weight")):
                tensor.copy_(0.5 + values.abs())
            else:
                tensor.copy_(values * (0.3 if name.endswith("weight") else 0.1))
    return model


def uneven_network():
    """The same network with one channel, between ``depthwise`` and ``pointwise``, 100 times as large as the others."""
    model = torch_network()
    with torch.no_grad():
        model.bn2.weight[2] *= 100
        model.bn2.bias[2] *= 100
        model.pointwise.weight[:, 2] /= 100
    return model


def arrays(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


PROTOTXT = """
name: "three_doors"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 } }
layer { name: "bn1" type: "BatchNorm" bottom: "conv1" top: "bn1"
  batch_norm_param { use_global_stats: true eps: 1e-5 } }
layer { name: "scale1" type: "Scale" bottom: "bn1" top: "scale1" scale_param { bias_term: true } }
layer { name: "relu1" type: "ReLU" bottom: "scale1" top: "relu1" }
layer { name: "depthwise" type: "Convolution" bottom: "relu1" top: "depthwise"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 group: 8 } }
layer { name: "bn2" type: "BatchNorm" bottom: "depthwise" top: "bn2"
  batch_norm_param { use_global_stats: true eps: 1e-5 } }
layer { name: "scale2" type: "Scale" bottom: "bn2" top: "scale2" scale_param { bias_term: true } }
layer { name: "relu2" type: "ReLU" bottom: "scale2" top: "relu2" }
layer { name: "pointwise" type: "Convolution" bottom: "relu2" top: "pointwise"
  convolution_param { num_output: 8 kernel_size: 1 } }
layer { name: "add" type: "Eltwise" bottom: "relu1" bottom: "pointwise" top: "add" }
layer { name: "relu3" type: "ReLU" bottom: "add" top: "relu3" }
layer { name: "branch" type: "Convolution" bottom: "relu3" top: "branch"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
layer { name: "concat" type: "Concat" bottom: "relu3" bottom: "branch" top: "concat" }
layer { name: "pool" type: "Pooling" bottom: "concat" top: "pool"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc" inner_product_param { num_output: 5 } }
"""


def caffe_pair(model, folder):
    (folder / "net.prototxt").write_text(PROTOTXT)
    net = caffe.Net(str(folder / "net.prototxt"), caffe.TEST)
    values = arrays(model)
    for name in LAYERS:
        net.params[name][0].data[...] = values[f"{name}.weight"].reshape(net.params[name][0].data.shape)
        net.params[name][1].data[...] = values[f"{name}.bias"]
    for norm, scale in (("bn1", "scale1"), ("bn2", "scale2")):
        net.params[norm][0].data[...] = values[f"{norm}.running_mean"]
        net.params[norm][1].data[...] = values[f"{norm}.running_var"]
        net.params[norm][2].data[...] = 1
        net.params[scale][0].data[...] = values[f"{norm}.weight"]
        net.params[scale][1].data[...] = values[f"{norm}.bias"]
    net.save(str(folder / "net.caffemodel"))
    return folder / "net.prototxt", folder / "net.caffemodel"


def onnx_file(model, folder):
    values = arrays(model)

    def parameters(layer, *parts):
        return [f"{layer}.{part}" for part in parts]

    def norm(name, source, target):
        inputs = [source, *parameters(name, "weight", "bias", "running_mean", "running_var")]
        return helper.make_node("BatchNormalization", inputs, [target], name, epsilon=EPSILON)

    def conv(name, source, **attributes):
        return helper.make_node("Conv", [source, *parameters(name, "weight", "bias")], [name], name, **attributes)

    padded = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        conv("conv1", "data", **padded),
        norm("bn1", "conv1", "bn1"),
        helper.make_node("Relu", ["bn1"], ["relu1"], "relu1"),
        conv("depthwise", "relu1", group=8, **padded),
        norm("bn2", "depthwise", "bn2"),
        helper.make_node("Relu", ["bn2"], ["relu2"], "relu2"),
        conv("pointwise", "relu2", kernel_shape=[1, 1]),
        helper.make_node("Add", ["relu1", "pointwise"], ["add"], "add"),
        helper.make_node("Relu", ["add"], ["relu3"], "relu3"),
        conv("branch", "relu3", **padded),
        helper.make_node("Concat", ["relu3", "branch"], ["concat"], "concat", axis=1),
        helper.make_node("MaxPool", ["concat"], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", *parameters("fc", "weight", "bias")], ["output"], "fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "three_doors",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [4, 3, 8, 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [4, 5])],
        [numpy_helper.from_array(array, name) for name, array in values.items() if array.dtype == np.float32],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    onnx.save(proto, folder / "net.onnx")
    return folder / "net.onnx"
