"""Nets that run in onnxruntime: the same results as in the engine, every change is seen; which nets do so unasked."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from amct.caffe import pycaffe as caffe
from amct.caffe.onnx.session_pass import SessionPass
from amct.caffe.pycaffe import net as pycaffe_net
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


WEIGHTS_ONLY = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 20 dim: 20 } } }
layer { name: "round" type: "RetrainWeightQuant" retrain_weight_quant_param { object_layer: "pool" num_bits_w: 4 } }
layer { name: "pool" type: "Convolution" bottom: "data" top: "pool" convolution_param { num_output: 8 kernel_size: 3 } }
"""


def runs_in_session(net):
    return any(isinstance(plan.repeat, SessionPass) for plan in net._plans.values())


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
    assert all(isinstance(plan.repeat, SessionPass) for plan in fast._plans.values())
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
    session = plan.repeat
    for seed in (1, 2, 3):
        check_equal(fast, net, images(seed))
    assert plan.repeat is session
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
    monkeypatch.setattr("amct.caffe.onnx.graph.onnx_form_of", lambda _: None)
    with caplog.at_level(logging.WARNING, "amct"):
        for seed in (1, 2, 3):
            check_equal(fast, net, images(seed))
    assert len(said(caplog)) == 1
    assert 'layer "a" (Convolution): there is no ONNX form' in said(caplog)[0]
    assert not runs_in_session(fast)


def test_a_net_that_remembers_stays_in_the_engine(write, caplog):
    path = write(LSTM)
    fast, net = randomized(path, keep_blobs=False, runtime="onnxruntime"), randomized(path)
    with caplog.at_level(logging.WARNING, "amct"):
        for seed in (1, 2, 3):
            data = np.random.RandomState(seed).randn(2, 3, 5)
            got, want = (each.forward(data=data, cont=np.ones((2, 3)))["lstm"] for each in (fast, net))
            np.testing.assert_allclose(got, want, **TOLERANCE)
    assert not runs_in_session(fast)


@pytest.mark.parametrize("runtime", [None, "onnxruntime", "torch"])
def test_equal_inputs_give_equal_bits_in_every_pass(write, runtime):
    net = randomized(write(NET), keep_blobs=False, runtime=runtime)
    first = net.forward(data=images(1))["pool"].copy()
    net.forward(data=images(2))
    np.testing.assert_array_equal(net.forward(data=images(1))["pool"], first)
    assert runs_in_session(net) == (runtime != "torch")


def test_a_net_that_onnxruntime_cannot_run_stays_in_the_engine(write, caplog, monkeypatch):
    path = write(NET)
    fast, net = randomized(path, keep_blobs=False, runtime="onnxruntime"), randomized(path)
    monkeypatch.setattr(
        "onnxruntime.InferenceSession.run", lambda *_: (_ for _ in ()).throw(ValueError("no memory\nat all"))
    )
    with caplog.at_level(logging.WARNING, "amct"):
        for seed in (1, 2):
            check_equal(fast, net, images(seed))
    assert [text.endswith("runs without onnxruntime: no memory") for text in said(caplog)] == [True]
    assert not runs_in_session(fast)


@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_weights_that_another_layer_rounds_are_rounded(write, runtime):
    path = write(WEIGHTS_ONLY)
    fast, net = randomized(path, keep_blobs=False, runtime=runtime), randomized(path)
    for seed in (1, 2):
        check_equal(fast, net, images(seed))
    assert not runs_in_session(fast)


MEAN_PRODUCTS = (2 * 8 * 20 * 20 * 27 + 2 * 8 * 20 * 20 * 8) // 2
PARAMETERS = 8 * 27 + 8 + 8 + 8 + 8 * 8 + 8


@pytest.mark.parametrize(
    ("limit", "value", "is_small"),
    [
        ("SMALL_CONVOLUTION", MEAN_PRODUCTS, True),
        ("SMALL_CONVOLUTION", MEAN_PRODUCTS - 1, False),
        ("FEW_PARAMETERS", PARAMETERS, True),
        ("FEW_PARAMETERS", PARAMETERS - 1, False),
    ],
)
def test_only_nets_of_small_convolutions_and_few_parameters_run_there_unasked(
    write, monkeypatch, limit, value, is_small
):
    monkeypatch.setattr(pycaffe_net, limit, value)
    path = write(NET)
    fast, net = randomized(path, keep_blobs=False), randomized(path)
    check_equal(fast, net, images())
    assert runs_in_session(fast) == is_small
    assert not runs_in_session(net)  # it keeps all blobs


DECONVOLUTION = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 4 dim: 5 dim: 5 } } }
layer { name: "up" type: "Deconvolution" bottom: "data" top: "up"
  convolution_param { num_output: 2 kernel_size: 2 stride: 2 group: 2 } }
"""


def test_the_products_of_a_deconvolution_are_those_of_its_bottom(write, monkeypatch):
    path, data = write(DECONVOLUTION), np.ones((1, 4, 5, 5))
    for limit, is_small in ((4 * 5 * 5 * 1 * 2 * 2, True), (4 * 5 * 5 * 1 * 2 * 2 - 1, False)):
        monkeypatch.setattr(pycaffe_net, "SMALL_CONVOLUTION", limit)
        net = randomized(path, keep_blobs=False)
        net.forward(data=data)
        assert runs_in_session(net) == is_small


def test_nets_without_convolutions_and_of_the_training_phase_stay_in_the_engine(write):
    dense = (
        'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 } } } '
        'layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 4 } }'
    )
    net = caffe.Net(write(dense), caffe.TEST, keep_blobs=False)
    net.forward()
    training = caffe.Net(write(NET), caffe.TRAIN, keep_blobs=False)
    training.forward()
    assert not runs_in_session(net)
    assert not runs_in_session(training)


def test_a_net_that_changes_all_the_time_stays_in_the_engine_in_the_end(write):
    path = write(NET)
    fast, net = randomized(path, keep_blobs=False), randomized(path)
    in_session = []
    for count in range(1, pycaffe_net.MOST_SESSIONS + 3):
        for each in (fast, net):
            each.blobs["data"].reshape(count, 3, 20, 20)
        check_equal(fast, net, images(count, count))
        in_session.append(runs_in_session(fast))
    assert in_session == [True] * pycaffe_net.MOST_SESSIONS + [False] * 2


def test_a_net_without_an_onnx_form_stays_in_the_engine_silently(write, caplog, monkeypatch):
    monkeypatch.setattr("amct.caffe.onnx.graph.onnx_form_of", lambda _: None)
    net = randomized(write(NET), keep_blobs=False)
    with caplog.at_level(logging.WARNING, "amct"):
        net.forward(data=images())
    assert not runs_in_session(net)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"runtime": "tensorrt", "keep_blobs": False},
            'runtime: expected None, "torch" or "onnxruntime", got \'tensorrt\'',
        ),
        ({"runtime": "onnxruntime"}, "it needs keep_blobs=False"),
        ({"runtime": "onnxruntime", "keep_blobs": False, "phase": caffe.TRAIN}, "phase caffe.TEST"),
    ],
)
def test_wrong_arguments(write, options, message):
    with pytest.raises(ArgumentError, match=message):
        caffe.Net(write(NET), **{"phase": caffe.TEST, **options})
