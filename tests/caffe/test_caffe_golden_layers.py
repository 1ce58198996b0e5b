"""Every single-layer and whole-net case recorded from a real Caffe, through the face of pycaffe."""

from __future__ import annotations

import json

import numpy as np
import pytest
from caffe_cases import LAYER_CASES, NET_CASES, Case

from amct.caffe import pycaffe as caffe

# float32 sums of up to a few hundred products, in another order than OpenBLAS adds them
RTOL, ATOL = 1e-4, 1e-5
# In place, Caffe's Clip and Power read values that they have just overwritten; ours are the derivatives.
WRONG_IN_CAFFE = {"power_inplace_2"}


def load(case: Case):
    data = np.load(case.stem.with_suffix(".npz"))
    meta = json.loads(str(data["meta"]))
    phase = caffe.TRAIN if meta.get("phase") == "TRAIN" else caffe.TEST
    weights = case.stem.with_suffix(".caffemodel")
    net = caffe.Net(str(case.stem.with_suffix(".prototxt")), phase, weights=str(weights) if weights.exists() else None)
    return data, meta, net


def close(ours, want):
    np.testing.assert_allclose(ours, want, rtol=RTOL, atol=ATOL)


def feed(net, data):
    for key in data.files:
        if key.startswith("in:"):
            blob = net.blobs[key[3:]]
            blob.reshape(*data[key].shape)
            blob.data[...] = data[key]


def keys(data, prefix):
    return {key[len(prefix) :]: data[key] for key in data.files if key.startswith(prefix)}


@pytest.mark.parametrize("case", LAYER_CASES + NET_CASES, ids=str)
def test_forward_and_gradients_agree_with_caffe(case):
    data, _, net = load(case)
    feed(net, data)
    net.forward()
    for name, want in keys(data, "out:").items():
        assert net.blobs[name].data.shape == want.shape
        close(net.blobs[name].data, want)
    for name, want in keys(data, "param_after:").items():
        layer, index = name.rsplit(":", 1)
        close(net.params[layer][int(index)].data, want)
    gradients = keys(data, "grad:")
    if gradients:
        for name, value in keys(data, "topdiff:").items():
            net.blobs[name].diff[...] = value
        net.backward()
    for name, want in gradients.items():
        if case.name in WRONG_IN_CAFFE:
            continue
        if name.startswith("param:"):
            _, layer, index = name.split(":")
            close(net.params[layer][int(index)].diff, want)
        else:
            close(net.blobs[name].diff, want)


@pytest.mark.parametrize("case", [case for case in LAYER_CASES if case.has("out2:")], ids=str)
def test_second_forward_agrees(case):
    data, _, net = load(case)
    feed(net, data)
    net.forward()
    feed(net, data)
    net.forward()
    for name, want in keys(data, "out2:").items():
        close(net.blobs[name].data, want)


@pytest.mark.parametrize("case", NET_CASES, ids=str)
def test_every_intermediate_value_agrees(case):
    """Values that a later layer overwrites in place are seen by stopping right behind the layer."""
    data, _, net = load(case)
    feed(net, data)
    for layer, want in keys(data, "after:").items():
        feed(net, data)
        found = net.forward(end=layer)
        (value,) = found.values()
        close(value, want)


@pytest.mark.parametrize("case", LAYER_CASES + NET_CASES, ids=str)
def test_net_is_built_as_caffe_builds_it(case):
    _, meta, net = load(case)
    assert net.layer_names == meta["layer_names"]
    assert [layer.type for layer in net.layers] == meta["layer_types"]
    assert list(net.blobs) == meta["blob_names"]
    assert net.inputs == meta["inputs"]
    assert net.outputs == meta["outputs"]
    assert dict(net.bottom_names) == meta["bottom_names"]
    assert dict(net.top_names) == meta["top_names"]
    assert dict(net.blob_loss_weights) == meta["loss_weights"]
    # the recorded shapes are those after a forward, and Filter changes them
    if case.name != "filter":
        assert {name: list(blob.shape) for name, blob in net.blobs.items()} == meta["blob_shapes"]


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", None])
@pytest.mark.parametrize("case", NET_CASES, ids=str)
def test_freeing_blobs_changes_no_output(case, runtime):
    data, _, _ = load(case)
    stem = case.stem
    net = caffe.Net(
        str(stem.with_suffix(".prototxt")),
        caffe.TEST,
        weights=str(stem.with_suffix(".caffemodel")),
        keep_blobs=False,
        runtime=runtime,
    )
    feed(net, data)
    outputs = net.forward()
    wanted = keys(data, "out:")
    assert outputs
    for name, value in outputs.items():
        close(value, wanted[name])


def test_power_in_place_gives_the_derivative():
    """What Caffe gets wrong: d/dx (shift + scale x)^2 = 2 scale (shift + scale x), times the gradient above."""
    (case,) = [case for case in LAYER_CASES if case.name == "power_inplace_2"]
    data, _, net = load(case)
    options = net.layer_dict[net.layer_names[-1]].parameter.power_param
    feed(net, data)
    net.forward()
    net.blobs["x"].diff[...] = data["topdiff:x"]
    net.backward()
    slope = 2 * options.scale * (options.shift + options.scale * data["in:x"].astype(np.float64))
    close(net.blobs["x"].diff, slope * data["topdiff:x"])


def test_the_gradient_of_bnll_at_zero_is_a_half(tmp_path):
    path = tmp_path / "bnll.prototxt"
    path.write_text(
        'force_backward: true layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 5 } } }'
        'layer { name: "y" type: "BNLL" bottom: "x" top: "y" }'
    )
    net = caffe.Net(str(path), caffe.TEST)
    x = np.float32([-3, -0.0, 0, 2, 60])
    close(net.forward(x=x)["y"], np.logaddexp(0, x))
    net.blobs["y"].diff[...] = 1
    net.backward()
    close(net.blobs["x"].diff, 1 / (1 + np.exp(-x)))


def test_all_cases_are_there():
    assert len(LAYER_CASES) == 194
    assert len(NET_CASES) == 7
