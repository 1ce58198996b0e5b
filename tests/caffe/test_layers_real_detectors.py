"""Published detectors, box by box as OpenCV's dnn module computes them."""

from __future__ import annotations

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe

pytestmark = pytest.mark.assets


def recorded(assets, folder, name):
    return np.load(assets.parent / "golden" / "real_models" / folder / f"{name}.opencv.npz")


@pytest.mark.parametrize("keep_blobs", [True, False], ids=["all blobs", "lean"])
def test_ssd_face(assets, keep_blobs):
    folder = assets / "caffe_res10_ssd_face"
    record = recorded(assets, folder.name, "deploy")
    net = caffe.Net(
        str(folder / "deploy.prototxt.txt"),
        caffe.TEST,
        weights=str(folder / "res10_300x300_ssd_iter_140000.caffemodel"),
        keep_blobs=keep_blobs,
    )
    for index, picture in enumerate(record["in:data"]):
        found = net.forward(data=picture[None])["detection_out"][0, 0]
        expected = record[f"out:detection_out:{index}"][0, 0]
        expected = expected[expected[:, 2] > 0]  # OpenCV fills up to keep_top_k with zeros
        assert len(found) == len(expected)
        # forty float32 layers: scores and corners agree to a few units in the fifth digit
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def test_ssd_face_of_several_pictures_at_once(assets):
    folder = assets / "caffe_res10_ssd_face"
    record = recorded(assets, folder.name, "deploy")
    net = caffe.Net(
        str(folder / "deploy.prototxt.txt"),
        caffe.TEST,
        weights=str(folder / "res10_300x300_ssd_iter_140000.caffemodel"),
        keep_blobs=False,
    )
    net.blobs["data"].reshape(2, 3, 300, 300)
    rows = net.forward(data=record["in:data"][1:3])["detection_out"][0, 0]
    for index in (0, 1):
        expected = record[f"out:detection_out:{index + 1}"][0, 0]
        expected = expected[expected[:, 2] > 0][:, 1:]
        found = rows[rows[:, 0] == index][:, 1:]
        np.testing.assert_allclose(found[:20], expected[:20], rtol=0, atol=5e-5)


@pytest.mark.parametrize("runtime", ["torch", None], ids=["torch", "by default"])
@pytest.mark.parametrize("name", ["RFB-320", "slim-320"])
def test_ultralight_face(assets, name, runtime):
    folder = assets / "ultralight_face"
    record = recorded(assets, folder.name, name)
    weights = str(folder / f"{name}.caffemodel")
    net = caffe.Net(str(folder / f"{name}.prototxt"), caffe.TEST, weights=weights, keep_blobs=False, runtime=runtime)
    for index, picture in enumerate(record["in:data"]):
        net.blobs["input"].reshape(1, *picture.shape)
        outputs = net.forward(input=picture[None])
        for top in ("boxes", "scores"):
            np.testing.assert_allclose(outputs[top], record[f"out:{top}:{index}"], rtol=1e-3, atol=1e-4)


def test_relu6_form_of_efficientnet(assets):
    """The same weights with Clip and with ReLU6 layers give the same."""
    folder = assets / "caffe_efficientnet_lite0"
    weights = str(folder / "efficientnet_lite0.caffemodel")
    picture = np.random.RandomState(1).uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)
    results = []
    for prototxt in ("deploy.prototxt", "deploy_opencv_relu6.prototxt"):
        net = caffe.Net(str(folder / prototxt), caffe.TEST, weights=weights, keep_blobs=False)
        (result,) = net.forward(**{net.inputs[0]: picture}).values()
        results.append(result.copy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
