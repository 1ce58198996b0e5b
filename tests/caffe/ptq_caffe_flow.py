"""The guide's flow, for tests: config, init, weights, activations, the user's forwards, save."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from guide_messages import read_as_converter

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import parse_message

NETS = ("mini_caffenet", "mini_fcn", "mini_inception", "mini_mobilenet", "mini_resnet", "siamese", "legacy_v0")

OFF_BY_DEFAULT = (
    "AbsVal", "PReLU", "ReLU", "Scale", "BatchNorm", "Bias", "Clip", "RReLU", "ReLU6", "Swish", "Pad", "Equal",
    "Greater", "ReduceMax", "ReduceMin", "Sign", "Cos", "Sin", "TopK", "Unpooling", "Erf",
)  # fmt: skip


@dataclass
class Flow:
    """The paths of one run."""

    folder: Path
    model: Path
    weights: Path

    @property
    def config(self):
        return self.folder / "config.json"

    @property
    def record(self):
        return self.folder / "record.txt"

    @property
    def modified(self):
        return self.folder / "modified.prototxt", self.folder / "modified.caffemodel"

    @property
    def prefix(self):
        return self.folder / "out" / "net"

    def configure(self, batch_num=2, text=None, change=None, **options):
        if text is not None:
            (self.folder / "quant.cfg").write_text(text)
            options["config_defination"] = str(self.folder / "quant.cfg")
        amct.create_quant_config(str(self.config), str(self.model), str(self.weights), batch_num, **options)
        if change is not None:
            content = json.loads(self.config.read_text())
            change(content)
            self.config.write_text(json.dumps(content))
        return self

    def init(self):
        return amct.init(str(self.config), str(self.model), str(self.weights), str(self.record))

    def prepare(self):
        graph = self.init()
        amct.weights_quantize_model(graph, *map(str, self.modified))
        amct.activation_quantize_model(graph, *map(str, self.modified))
        return graph

    def run(self, batches=2):
        graph = self.prepare()
        forward(self.net(*self.modified), batches)
        amct.save_model(graph, "Both", str(self.prefix))
        return graph

    def net(self, model, weights):
        return caffe.Net(str(model), str(weights), caffe.TEST)

    def original(self):
        return self.net(self.model, self.weights)

    def result(self, kind):
        return self.net(*self.result_files(kind))

    def result_files(self, kind):
        read_as_converter(self.out(f"{kind}_model.prototxt"))
        return self.out(f"{kind}_model.prototxt"), self.out(f"{kind}_weights.caffemodel")

    def out(self, name):
        return self.prefix.with_name(f"net_{name}")


def golden_flow(name, golden, folder):
    nets = golden / "caffe" / "nets"
    return Flow(folder, nets / f"{name}.prototxt", nets / f"{name}.caffemodel")


def batch(net, seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(net.blobs[name].shape).astype(np.float32) for name in net.inputs}


def forward(net, batches, first_seed=0):
    for seed in range(first_seed, first_seed + batches):
        result = net.forward(**batch(net, seed))
    return result


def text_flow(text, folder, *, seed=0, spread=0.3):
    """A net from its text, with random weights (positive ones where a variance is)."""
    (folder / "net.prototxt").write_text(text)
    caffe.set_random_seed(seed)
    net = caffe.Net(str(folder / "net.prototxt"), caffe.TEST)
    random = np.random.default_rng(seed)
    for name, blobs in net.params.items():
        for index, blob in enumerate(blobs):
            values = random.standard_normal(blob.shape) * spread
            if net.layer_dict[name].type == "BatchNorm":
                values = np.ones(blob.shape) if index == 2 else np.abs(values) + (0.5 if index else 0.0)
            if net.layer_dict[name].type == "Scale" and index == 0:
                values = values + 1
            blob.data[...] = values
    net.save(str(folder / "net.caffemodel"))
    return Flow(folder, folder / "net.prototxt", folder / "net.caffemodel")


def prototxt(path):
    return parse_message(Path(path).read_text(), "NetParameter", str(path))


def cosine(first, second):
    a, b = np.asarray(first, np.float64).ravel(), np.asarray(second, np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
