"""Layers of fake-quant models in a small Caffe of the tests: sums of integers, and float where there are none."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_patch_layers import Flow, batch

from amct.caffe import pycaffe as caffe

TWO_BOTTOMS = """
layer { name: "a" type: "Input" top: "a" input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "b" type: "Input" top: "b" input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "quant_a" type: "Quant" bottom: "a" top: "qa" quant_param { scale: 0.02 object_layer: "conv" } }
layer { name: "quant_b" type: "Quant" bottom: "b" top: "qb"
  quant_param { scale: 0.03 offset: 5 object_layer: "conv" index: 1 } }
layer { name: "conv" type: "Convolution" bottom: "qa" bottom: "qb" top: "ya" top: "yb"
  convolution_param { num_output: 3 kernel_size: 3 } }
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nets(small_caffe, tmp_path):
    """The same fake-quant model in both."""
    flow = Flow(tmp_path).prepare().save()
    return small_caffe.net(*flow.files("net_fake_quant_model")), flow.engine("net_fake_quant_model")


def outputs(nets, data):
    net, other = nets
    return net.forward(data=data).get("fc2"), other.forward(data=data)["fc2"].reshape(-1)


def test_every_bit_is_that_of_the_engine(nets):
    for seed in range(5):
        found, wanted = outputs(nets, batch(seed) * 2)
        assert np.array_equal(found.astype(np.float32), wanted)


def test_weights_that_change_are_found_anew(nets):
    net, other = nets
    before, _ = outputs(nets, batch(3))
    weight = other.params["conv1"][0].data * 0.5  # on the grid of half the scale; the bias is whole steps of it, too
    net.put("conv1", weight, 0)
    other.params["conv1"][0].data[...] = weight
    found, wanted = outputs(nets, batch(3))
    assert np.array_equal(found.astype(np.float32), wanted)
    assert not np.array_equal(found, before)
    random = np.random.default_rng(0).normal(size=weight.shape)  # on no grid: the plain layer computes
    net.put("fc2", other.params["fc2"][0].data * 0, 0)
    net.put("conv1", random, 0)
    other.params["conv1"][0].data[...] = random
    found, _ = outputs(nets, batch(3))
    np.testing.assert_allclose(found.reshape(2, -1)[0], other.params["fc2"][1].data, rtol=1e-6)


def test_weights_on_no_grid_are_multiplied_in_float(small_caffe, tmp_path):
    path = tmp_path / "float.prototxt"
    path.write_text(re.sub(r'layer \{ name: "(b|quant_b)".*?\} \}\n', "", TWO_BOTTOMS, flags=re.DOTALL).replace(
        'bottom: "qb" top: "ya" top: "yb"', 'top: "ya"'
    ))  # fmt: skip
    weight = np.random.default_rng(1).normal(size=(3, 4, 3, 3)).astype(np.float32)
    found = run_with(small_caffe.net(path), weight, a=batch(0))
    wanted = run_with(caffe.Net(str(path), caffe.TEST), weight, a=batch(0))
    np.testing.assert_allclose(found["ya"], wanted["ya"], atol=1e-5)


def test_two_bottoms_with_their_own_scales(small_caffe, tmp_path):
    path = tmp_path / "two.prototxt"
    path.write_text(TWO_BOTTOMS)
    weight = np.random.default_rng(1).integers(-127, 128, (3, 4, 3, 3)).astype(np.float32)
    weight.reshape(3, -1)[:, 0] = 127
    weight *= np.float32(0.01)
    given = {"a": batch(0), "b": batch(1)}
    found = run_with(small_caffe.net(path), weight, **given)
    wanted = run_with(caffe.Net(str(path), caffe.TEST), weight, **given)
    for name in ("ya", "yb"):
        assert np.array_equal(found[name].astype(np.float32), wanted[name])


def test_data_that_are_not_finite_stay_visible(nets):
    data = batch(0)
    data[1, 0, 2, 2] = np.nan
    found, wanted = outputs(nets, data)
    assert np.isnan(found).any()
    assert np.array_equal(np.isnan(found), np.isnan(wanted))


def run_with(net, weight, **inputs):
    """The outputs of the net with this weight and a bias of whole steps."""
    bias = np.array([3, -2, 0], np.float32) * np.float32(np.float64(np.float32(0.01)) * np.float64(np.float32(0.02)))
    tops = ("ya", "yb") if "b" in inputs else ("ya",)
    if hasattr(net, "put"):
        net.put("conv", weight, 0)
        net.put("conv", bias, 1)
        net.forward(**inputs)
        return {name: net.get(name) for name in tops}
    net.params["conv"][0].data[...], net.params["conv"][1].data[...] = weight, bias
    found = net.forward(**inputs)
    return {name: found[name].reshape(-1) for name in tops}
