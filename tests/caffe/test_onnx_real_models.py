"""Published Caffe models as ONNX: float equal to the engine, QDQ in integer kernels and near to float."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx_records import Ranges, fused_net, quantized_onnx
from onnx_running import feed, run, session
from PIL import Image

from amct.caffe.engine.net import Net
from amct.caffe.onnx.graph import float_onnx
from amct.caffe.onnx.quant import tensors_to_observe
from amct.export.onnx.runtimes import count_integer_kernels

pytestmark = pytest.mark.assets


@dataclass(frozen=True)
class Model:
    folder: str
    prototxt: str
    caffemodel: str

    def __str__(self):
        return f"{self.folder}/{self.prototxt}"

    def files(self, assets):
        return assets / self.folder / self.prototxt, assets / self.folder / self.caffemodel


SQUEEZENET = Model("caffe_squeezenet_v1.0_dc", "SqueezeNet_deploy.prototxt", "squeezenet_v1.0_dc.caffemodel")
OPEN_NSFW = Model("caffe_open_nsfw", "deploy.prototxt", "resnet_50_1by2_nsfw.caffemodel")
EFFICIENTNET = Model("caffe_efficientnet_lite0", "deploy.prototxt", "efficientnet_lite0.caffemodel")
MODELS = [
    Model("caffe_lenet_mnist", "lenet.prototxt", "lenet_iter_10000.caffemodel"),
    Model("caffe_cifar10_quick", "cifar10_quick.prototxt", "cifar10_quick_iter_5000.caffemodel"),
    Model("caffe_cifar10_full", "cifar10_full.prototxt", "cifar10_full_iter_70000.caffemodel"),
    SQUEEZENET,
    OPEN_NSFW,
    EFFICIENTNET,
    Model("caffe_efficientnet_lite0", "deploy_opencv_relu6.prototxt", "efficientnet_lite0.caffemodel"),
    Model("caffe_landmark106", "landmark106.prototxt", "landmark106.caffemodel"),
    *(Model("caffe_mtcnn", f"det{n}.prototxt", f"det{n}.caffemodel") for n in (1, 2, 3, 4)),
    Model("caffe_res10_ssd_face", "deploy.prototxt.txt", "res10_300x300_ssd_iter_140000.caffemodel"),
    Model("ultralight_face", "RFB-320.prototxt", "RFB-320.caffemodel"),
    Model("ultralight_face", "slim-320.prototxt", "slim-320.caffemodel"),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_float_outputs(model, assets):
    prototxt, caffemodel = model.files(assets)
    net = Net.from_file(prototxt, with_gradients=False)
    net.load_weights(caffemodel)
    exported = float_onnx(net)
    onnx.checker.check_model(exported.model, full_check=True)
    shape = (2, *net.blob("data" if "data" in net.graph.blob_names else "input").shape[1:])
    name = net.graph.blob_names[net.graph.inputs[0]]
    feeds = {name: 40 * np.random.default_rng(7).standard_normal(shape).astype(np.float32)}
    feed(net, feeds)
    net.forward()
    results = run(exported.model, feeds)
    ends = {output for output in results if output not in net.graph.blob_names}
    assert not ends
    for output, value in results.items():
        want = net.blob(output).data
        assert value.shape == want.shape
        # up to 60 layers deep, each adds float32 rounding of its own, relative to its largest value
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    if model.folder == "caffe_res10_ssd_face":
        assert 'before layer "detection_out" (DetectionOutput)' in exported.notes[0]
        assert sorted(results) == ["mbox_conf_flatten", "mbox_loc", "mbox_priorbox"]


def pictures(assets, count, size, convert):
    rows = (assets / "imagenet" / "labels.tsv").read_text().splitlines()[:count]
    batch = np.empty((count, 3, size, size), np.float32)
    start = (256 - size) // 2
    for picture, row in zip(batch, rows, strict=True):
        path = next((assets / "imagenet").rglob(row.split("\t")[0]))
        colours = np.asarray(Image.open(path).convert("RGB"), np.float32)
        picture[...] = convert(colours[start : start + size, start : start + size]).transpose(2, 0, 1)
    return batch


def bgr(colours):
    return colours[..., ::-1] - (104, 117, 123)


def signed_rgb(colours):
    return (colours - 127) / 128


@pytest.mark.parametrize(
    ("model", "size", "convert", "cosine"),
    [(SQUEEZENET, 227, bgr, 0.99), (OPEN_NSFW, 224, bgr, 0.999), (EFFICIENTNET, 224, signed_rgb, 0.98)],
    ids=["squeezenet", "open_nsfw", "efficientnet"],
)
def test_qdq_runs_in_integers_and_is_near_to_float(model, size, convert, cosine, assets, tmp_path):
    """Every layer that is quantizable and on by default is in the record, with the range of eight pictures."""
    net = fused_net(*model.files(assets))
    batch = pictures(assets, 12, size, convert)
    calibration, test = batch[:8], batch[8:]
    ranges = Ranges(net, tensors_to_observe(float_onnx(net)))
    for part in (calibration[:4], calibration[4:]):
        feed(net, {"data": part})
        net.forward()
        ranges.observe()
    record = ranges.record()
    exported = quantized_onnx(net, record, ranges.tensors())
    path = tmp_path / "qdq.onnx"
    path.write_bytes(exported.model.SerializeToString())
    kernels = count_integer_kernels(path)
    weighted = [layer for layer in net.layers if layer.type in ("Convolution", "DepthwiseConv", "InnerProduct")]
    print(f"{model}: {len(record)} layers in the record, {kernels.integer} of {kernels.total} products in integers")
    assert kernels.total >= len(weighted) - 1
    assert kernels.share >= 0.95
    floating = float_onnx(net)
    assert path.stat().st_size < 0.3 * floating.model.ByteSize()
    ours, theirs = session(exported.model).run(None, {"data": test}), session(floating.model).run(None, {"data": test})
    for one, two in zip(ours, theirs, strict=True):
        assert np.vdot(one, two) >= cosine * np.linalg.norm(one) * np.linalg.norm(two)
