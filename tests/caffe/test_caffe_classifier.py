"""Classifier and Detector: pictures of any size in, one prediction each out."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe import io

NET = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 10 dim: 3 dim: 5 dim: 5 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
"""


@pytest.fixture
def files(write, tmp_path):
    caffe.set_random_seed(1)
    path = write(NET)
    caffe.Net(path, caffe.TEST).save(str(tmp_path / "c.caffemodel"))
    return path, str(tmp_path / "c.caffemodel")


@pytest.fixture
def pictures():
    return [np.random.RandomState(0).rand(9, 7, 3), np.random.RandomState(1).rand(8, 8, 3)]


def softmax(scores):
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_predictions_are_the_nets_on_prepared_crops(files, pictures):
    options = {"image_dims": (8, 8), "mean": np.array([0.1, 0.2, 0.3]), "raw_scale": 255, "channel_swap": (2, 1, 0)}
    classifier = caffe.Classifier(*files, **options)
    weight, bias = (blob.data.astype(np.float64) for blob in classifier.params["ip"])
    centre = []
    for picture in pictures:
        crop = io.resize_image(picture, (8, 8))[1:6, 1:6].astype(np.float64)
        prepared = crop.transpose(2, 0, 1)[[2, 1, 0]] * 255 - np.array([0.1, 0.2, 0.3])[:, None, None]
        centre.append(prepared.ravel())
    want = softmax(np.stack(centre) @ weight.T + bias)
    np.testing.assert_allclose(classifier.predict(pictures, oversample=False), want, rtol=1e-3, atol=1e-5)
    averaged = classifier.predict(pictures)
    assert averaged.shape == (2, 4)
    np.testing.assert_allclose(averaged.sum(1), 1, rtol=1e-5)
    assert classifier.crop_dims.tolist() == [5, 5]
    assert classifier.image_dims == (8, 8)
    with pytest.raises(IndexError):
        classifier.predict([])


def test_without_image_dims_the_net_decides(files):
    classifier = caffe.Classifier(*files)
    assert classifier.image_dims.tolist() == [5, 5]
    assert classifier.predict([np.random.RandomState(0).rand(5, 5, 3)], oversample=False).shape == (1, 4)
    with pytest.raises(RuntimeError, match=r"Could not open file none\.caffemodel"):
        caffe.Classifier(files[0], "none.caffemodel")


@pytest.mark.parametrize("context_pad", [0, 1])
def test_detector_runs_windows(files, tmp_path, context_pad):
    picture = np.random.RandomState(0).randint(0, 256, (20, 30, 3), np.uint8)
    name = str(tmp_path / "p.png")
    Image.fromarray(picture).save(name)
    detector = caffe.Detector(
        *files, mean=np.array([10.0, 20.0, 30.0]), raw_scale=255, channel_swap=(2, 1, 0), context_pad=context_pad
    )
    boxes = np.array([[0, 0, 10, 10], [5, 8, 19, 29]])
    found = detector.detect_windows([(name, boxes)])
    assert [detection["filename"] for detection in found] == [name, name]
    assert [list(detection["window"]) for detection in found] == boxes.tolist()
    for detection in found:
        assert detection["prediction"].sum() == pytest.approx(1, rel=1e-5)


def test_what_lies_outside_the_picture_is_the_mean(files):
    detector = caffe.Detector(*files, mean=np.array([10.0, 20.0, 30.0]), raw_scale=1, context_pad=1)
    crop = detector.crop(np.full((20, 20, 3), 99.0, np.float32), (0, 0, 9, 9))
    assert crop.shape == (5, 5, 3)
    assert crop[0, 0].tolist() == [10, 20, 30]
    assert crop[4, 4].tolist() == [99, 99, 99]
