"""The flow of the functions of amct_caffe on a small net, for the layers of the patch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import amct_caffe as amct
from amct.caffe import pycaffe as caffe

if TYPE_CHECKING:
    from pathlib import Path

BODY = """name: "small"
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 6 kernel_size: 3 pad: 1 group: 2 } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "relu1" }
layer { name: "up" type: "Deconvolution" bottom: "relu1" top: "up"
  convolution_param { num_output: 4 kernel_size: 2 stride: 2 group: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "up" top: "conv2"
  convolution_param { num_output: 3 kernel_size: 3 stride: 2 bias_term: false } }
layer { name: "fc1" type: "InnerProduct" bottom: "conv2" top: "fc1"
  inner_product_param { num_output: 8 transpose: true } }
layer { name: "relu2" type: "ReLU" bottom: "fc1" top: "relu2" }
layer { name: "fc2" type: "InnerProduct" bottom: "relu2" top: "fc2" inner_product_param { num_output: 5 } }
"""
SHAPE = (2, 4, 6, 6)


@dataclass
class Flow:
    """The files of one run of the functions of amct_caffe."""

    folder: Path
    body: str = BODY

    def __post_init__(self):
        (self.folder / "net.prototxt").write_text(self.body)
        net = caffe.Net(str(self.folder / "net.prototxt"), caffe.TEST)
        random = np.random.default_rng(7)
        for blobs in net.params.values():
            for blob in blobs:
                blob.data[...] = random.normal(size=blob.shape) * 0.3
        net.save(str(self.folder / "net.caffemodel"))

    def path(self, name):
        return self.folder / name

    def text(self, *names):
        return [str(self.path(name)) for name in names]

    def prepare(self, config="batch_num: 2", **changes):
        """Up to the calibration model: ``changes`` are set in every layer of the JSON that can be quantized."""
        self.path("quant.cfg").write_text(config)
        amct.create_quant_config(
            *self.text("config.json", "net.prototxt", "net.caffemodel"), config_defination=str(self.path("quant.cfg"))
        )
        content = json.loads(self.path("config.json").read_text())
        for layer in content.values():
            if isinstance(layer, dict) and "activation_quant_params" in layer:
                given = layer["activation_quant_params"]
                for each in given if isinstance(given, list) else [given]:
                    each.update(changes)
                layer["quant_enable"] = True
        self.path("config.json").write_text(json.dumps(content))
        self.graph = amct.init(*self.text("config.json", "net.prototxt", "net.caffemodel", "record.txt"))
        amct.weights_quantize_model(self.graph, *self.text("modified.prototxt", "modified.caffemodel"))
        amct.activation_quantize_model(self.graph, *self.text("modified.prototxt", "modified.caffemodel"))
        return self

    def engine(self, name, phase=caffe.TEST):
        return caffe.Net(*self.text(f"{name}.prototxt", self.weights(name)), phase)

    def weights(self, name):
        return f"{name.replace('_model', '_weights')}.caffemodel"

    def files(self, name):
        return self.path(f"{name}.prototxt"), self.path(self.weights(name))

    def save(self):
        """Calibrate in the engine and write both models."""
        net = self.engine("modified")
        for seed in range(2):
            net.forward(data=batch(seed))
        amct.save_model(self.graph, "Both", str(self.path("net")))
        return self


def batch(seed, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_same_record(found, wanted):
    """The same keys in the same order; scales within 1e-6."""
    numbers = re.compile(r"(scale_[dw]): (\S+)")
    assert numbers.sub(r"\1", found) == numbers.sub(r"\1", wanted)
    values = [[float(each[1]) for each in numbers.findall(text)] for text in (found, wanted)]
    np.testing.assert_allclose(*values, rtol=1e-6)
    assert values[0]
