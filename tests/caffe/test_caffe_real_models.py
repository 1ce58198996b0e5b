"""Published Caffe models: outputs and statistics of every blob as a real Caffe computed them, and their accuracies."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe

pytestmark = pytest.mark.assets


@dataclass(frozen=True)
class Model:
    folder: str
    prototxt: str
    caffemodel: str
    recorded: str

    def __str__(self):
        return self.recorded

    def net(self, assets, **options):
        folder = assets / self.folder
        return caffe.Net(str(folder / self.prototxt), caffe.TEST, weights=str(folder / self.caffemodel), **options)

    def record(self, assets):
        return np.load(assets.parent / "golden" / "real_models" / self.folder / f"{self.recorded}.npz")


MODELS = [
    Model("caffe_lenet_mnist", "lenet.prototxt", "lenet_iter_10000.caffemodel", "lenet.caffe"),
    Model("caffe_cifar10_quick", "cifar10_quick.prototxt", "cifar10_quick_iter_5000.caffemodel", "cifar10_quick.caffe"),
    Model("caffe_cifar10_full", "cifar10_full.prototxt", "cifar10_full_iter_70000.caffemodel", "cifar10_full.caffe"),
    Model(
        "caffe_squeezenet_v1.0_dc",
        "SqueezeNet_deploy.prototxt",
        "squeezenet_v1.0_dc.caffemodel",
        "SqueezeNet_deploy.caffe",
    ),
    Model("caffe_open_nsfw", "deploy.prototxt", "resnet_50_1by2_nsfw.caffemodel", "deploy.caffe"),
    Model("caffe_efficientnet_lite0", "deploy.prototxt", "efficientnet_lite0.caffemodel", "deploy.caffe"),
    Model("caffe_landmark106", "landmark106.prototxt", "landmark106.caffemodel", "landmark106.caffe"),
    *(Model("caffe_mtcnn", f"det{n}.prototxt", f"det{n}.caffemodel", f"det{n}.caffe") for n in (1, 2, 3, 4)),
]
LENET, CIFAR_QUICK, CIFAR_FULL, SQUEEZENET = MODELS[:4]


@pytest.mark.parametrize(
    ("keep_blobs", "runtime"),
    [(True, None), (False, "torch"), (False, "onnxruntime")],
    ids=["all blobs", "lean", "lean in onnxruntime"],
)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_outputs_and_blob_statistics(model, keep_blobs, runtime, assets):
    record = model.record(assets)
    net = model.net(assets, keep_blobs=keep_blobs, runtime=runtime)
    net.blobs["data"].reshape(*record["in:data"].shape)
    net.blobs["data"].data[...] = record["in:data"]
    outputs = net.forward()
    for key in record.files:
        if key.startswith("out:"):
            # up to 60 layers deep, each adds float32 rounding of its own
            scale = np.abs(record[key]).max()
            np.testing.assert_allclose(outputs[key[4:]], record[key], rtol=1e-3, atol=1e-4 * scale)
    if keep_blobs:
        for name, (shape, mean, std, low, high) in statistics(record).items():
            values = net.blobs[name].data
            assert list(values.shape) == shape
            np.testing.assert_allclose(
                [values.mean(), values.std(), values.min(), values.max()],
                [mean, std, low, high],
                rtol=1e-3,
                atol=1e-4 * max(abs(low), abs(high), 1e-3),
            )


def statistics(record):
    """Shape, mean, standard deviation, minimum and maximum of every blob."""
    return json.loads(str(record["stats"]))


def images(path, count):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(16 + count * 784), np.uint8, offset=16).reshape(count, 1, 28, 28)


def labels(path, count):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(8 + count), np.uint8, offset=8)


def accuracy(net, pictures, truth):
    out = net.forward_all(data=pictures)[net.outputs[0]]
    return float((out.reshape(len(truth), -1).argmax(1) == truth).mean())


def test_lenet_recognizes_digits(assets):
    """99.05 % on all 10 000; on the first 1000 a real Caffe gets between 98.5 and 99.5 %."""
    net = LENET.net(assets, keep_blobs=False)
    net.blobs["data"].reshape(100, 1, 28, 28)
    pictures = images(assets / "mnist" / "t10k-images-idx3-ubyte.gz", 1000).astype(np.float32) / 256
    assert accuracy(net, pictures, labels(assets / "mnist" / "t10k-labels-idx1-ubyte.gz", 1000)) > 0.98


@pytest.mark.parametrize(("model", "least"), [(CIFAR_FULL, 0.79), (CIFAR_QUICK, 0.71)], ids=["full", "quick"])
def test_cifar_nets(model, least, assets):
    """82.10 % and 74.62 % on 6000 pictures; 500 of them may be 3 points off (two standard deviations)."""
    data = np.load(assets / "cifar10" / "test_6000.npz")
    mean = np.load(assets / "cifar10" / "train_mean_rgb_chw.npy")
    pictures = data["x"][:500].transpose(0, 3, 1, 2).astype(np.float32) - mean
    net = model.net(assets, keep_blobs=False)
    net.blobs["data"].reshape(50, 3, 32, 32)
    assert accuracy(net, pictures, data["y"][:500]) > least


def test_squeezenet_classifies(assets):
    """84.17 % top-5 on 600 pictures; 90 of them may be 8 points off (two standard deviations)."""
    from PIL import Image

    rows = [line.split("\t") for line in (assets / "imagenet" / "labels.tsv").read_text().splitlines()][:90]
    pictures = np.empty((len(rows), 3, 227, 227), np.float32)
    for picture, (name, *_) in zip(pictures, rows, strict=True):
        colours = np.asarray(Image.open(next((assets / "imagenet").rglob(name))).convert("RGB"), np.float32)
        start = (256 - 227) // 2
        bgr = colours[start : start + 227, start : start + 227, ::-1] - (104, 117, 123)
        picture[...] = bgr.transpose(2, 0, 1)
    net = SQUEEZENET.net(assets, keep_blobs=False)
    net.blobs["data"].reshape(10, 3, 227, 227)
    scores = net.forward_all(data=pictures)[net.outputs[0]].reshape(len(rows), -1)
    best = np.argsort(-scores, axis=1)[:, :5]
    assert np.mean([int(label) in five for (_, label, *_), five in zip(rows, best, strict=True)]) > 0.76
