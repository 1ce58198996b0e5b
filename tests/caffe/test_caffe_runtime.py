"""Nets that run in onnxruntime: the same results as in the engine, and every change is seen."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from amct.caffe import pycaffe as caffe
from amct.caffe.onnx.session_pass import SessionPass
from amct.errors import ArgumentError

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
NET = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 20 dim: 20 } } }
layer { name: "a" type: "Convolution" bottom: "data" top: "a"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 } }
layer { name: "scale" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "Convolution" bottom: "a" top: "b" convolution_param { num_output: 8 kernel_size: 1 } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" }
layer { name: "pool" type: "Pooling" bottom: "sum" top: "pool" pooling_param { kernel_size: 3 stride: 2 } }
layer { name: "other" type: "Pooling" bottom: "b" top: "other" pooling_param { pool: AVE global_pooling: true } }
"""
LSTM = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 } } }
layer { name: "on" type: "Input" top: "cont" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "lstm" type: "LSTM" bottom: "data" bottom: "cont" top: "lstm" recurrent_param { num_output: 4 } }
"""


def randomized(path, **options):
    net = caffe.Net(path, caffe.TEST, **options)
    random = np.random.RandomState(0)
    for blobs in net.params.values():
        for blob in blobs:
            blob.data[...] = random.randn(*blob.shape) * 0.3
    return net


def pair(write, **options):
    """The net in onnxruntime, after the pass that loads it there, and the net in the engine."""
    path = write(NET)
    fast = randomized(path, runtime="onnxruntime", **{"keep_blobs": False, **options})
    fast.forward(data=np.ones((2, 3, 20, 20)))
    assert all(isinstance(plan.bound, SessionPass) for plan in fast._plans.values())
    return fast, randomized(path)


def images(seed=0, count=2):
    return np.random.RandomState(seed).randn(count, 3, 20, 20)


def check_equal(fast, net, data, **options):
    got, want = (each.forward(data=data, **options) for each in (fast, net))
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, **TOLERANCE)


def test_results_are_those_of_the_engine(write):
    fast, net = pair(write)
    (plan,) = fast._plans.values()
    session = plan.bound
    for seed in (1, 2, 3):
        check_equal(fast, net, images(seed))
    assert plan.bound is session
    with pytest.raises(ArgumentError, match="freed after its last use"):
        _ = fast.blobs["sum"].data


def test_parameters_shapes_and_threads_may_change(write):
    fast, net = pair(write)
    for each in (fast, net):
        each.params["b"][0].data[...] *= 2
    for seed in (1, 2):
        check_equal(fast, net, images(seed))
    for each in (fast, net):
        each.blobs["data"].reshape(1, 3, 20, 20)
    for seed in (1, 2):
        check_equal(fast, net, images(seed, 1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        for seed in (1, 2):
            check_equal(fast, net, images(seed, 1))
    finally:
        torch.set_num_threads(before)
    held = [each.params["b"][0].data for each in (fast, net)]
    for seed in (1, 2, 3):
        for array in held:
            array[...] += 0.1
        check_equal(fast, net, images(seed, 1))


def test_other_blobs_and_parts_of_the_net(write):
    fast, net = pair(write, keep_blobs=["sum"])
    for seed in (1, 2):
        check_equal(fast, net, images(seed), blobs=["b"])
        np.testing.assert_allclose(fast.blobs["sum"].data, net.blobs["sum"].data, **TOLERANCE)
        check_equal(fast, net, images(seed), end="sum")
        check_equal(fast, net, images(seed))


def test_an_array_of_an_output_shows_later_results(write):
    fast, net = pair(write)
    held = fast.forward(data=images(1))["pool"]
    for seed in (2, 3):
        fast.forward(data=images(seed))
        np.testing.assert_allclose(held, net.forward(data=images(seed))["pool"], **TOLERANCE)


def said(caplog):
    return [record.message for record in caplog.records if "runs without onnxruntime" in record.message]


def test_a_net_without_an_onnx_form_stays_in_the_engine(write, caplog, monkeypatch):
    path = write(NET)
    fast, net = randomized(path, keep_blobs=False, runtime="onnxruntime"), randomized(path)
    monkeypatch.setattr("amct.caffe.onnx.graph.form_of", lambda _: None)
    with caplog.at_level(logging.WARNING, "amct"):
        for seed in (1, 2, 3):
            check_equal(fast, net, images(seed))
    assert len(said(caplog)) == 1
    assert 'layer "a" (Convolution): there is no ONNX form' in said(caplog)[0]
    assert not any(isinstance(plan.bound, SessionPass) for plan in fast._plans.values())


def test_a_net_that_remembers_stays_in_the_engine(write, caplog):
    path = write(LSTM)
    fast, net = randomized(path, keep_blobs=False, runtime="onnxruntime"), randomized(path)
    with caplog.at_level(logging.WARNING, "amct"):
        for seed in (1, 2, 3):
            data = np.random.RandomState(seed).randn(2, 3, 5)
            got, want = (each.forward(data=data, cont=np.ones((2, 3)))["lstm"] for each in (fast, net))
            np.testing.assert_allclose(got, want, **TOLERANCE)
    assert not any(isinstance(plan.bound, SessionPass) for plan in fast._plans.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "tensorrt", "keep_blobs": False}, "runtime: expected None or \"onnxruntime\", got 'tensorrt'"),
        ({"runtime": "onnxruntime"}, "it needs keep_blobs=False"),
        ({"runtime": "onnxruntime", "keep_blobs": False, "phase": caffe.TRAIN}, "phase caffe.TEST"),
    ],
)
def test_wrong_arguments(write, options, message):
    with pytest.raises(ArgumentError, match=message):
        caffe.Net(write(NET), **{"phase": caffe.TEST, **options})
