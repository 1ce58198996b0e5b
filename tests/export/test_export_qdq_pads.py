"""Zero Pads before convolutions in the fast QDQ file: the convolution adds the zeros itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from export_nets import Net, calibrate, changed, run
from onnx import TensorProto

from amct.export.qdq.exporter import plan_tensors, qdq_model


def padded(amounts, *, opset=17, axes=None, merged=False, size=(9, 9), groups=1, **settings):
    """conv → relu → Pad → conv; with ``merged`` the second convolution has the zeros of the Pad as its own."""
    places = len(size)
    net = Net(opset=opset)
    x = net.layer("Conv", "first", net.input("x", 2, 3, *size), net.weight("w1", 6, 3, *[1] * places))
    x = net.add("LeakyRelu", "leaky", x, alpha=0.3)  # values below zero: the integer of zero is not the lowest
    own = settings.pop("pads", [0] * (2 * places))
    if merged:
        net.constant("amounts", np.zeros(1, np.int64))
        own = [one + other for one, other in zip(own, merged, strict=True)]
    else:
        inputs = [net.constant("amounts", np.array(amounts, np.int64))]
        if axes is not None:
            inputs += ["", net.constant("axes", np.array(axes, np.int64))]
        x = net.add("Pad", "frame", x, *inputs)
    weight = net.weight("w2", 6, 6 // groups, *[3] * places)
    bias = net.weight("b2", 6)
    if "auto_pad" not in settings:
        settings["pads"] = own
    net.layer("Conv", "second", x, weight, bias, outputs=["y"], group=groups, **settings)
    return net, net.model("y")


def operators(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    ("amounts", "merged", "options"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1], {}),
        ([0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1], {"strides": [2, 2], "groups": 6}),
        ([0, 0, 3, 0, 0, 0, 1, 5], [3, 0, 1, 5], {"pads": [1, 0, 0, 2], "groups": 2}),
        ([2, 1], [0, 2, 0, 1], {"opset": 18, "axes": [-1]}),
        ([0, 0, 2, 0, 0, 1], [2, 1], {"size": (12,)}),
        ([0, 0, 1, 0, 2, 0, 0, 0, 1, 1], [1, 0, 2, 0, 1, 1], {"size": (5, 6, 7)}),
        ([0, 0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1], {"auto_pad": "VALID"}),
    ],
)
@pytest.mark.parametrize("target", ["portable", "vnni"])
def test_a_zero_pad_becomes_part_of_the_convolution_behind_it(amounts, merged, options, target):
    net, model = padded(amounts, **options)
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target=target)
    assert "Pad" not in operators(exported.model)
    plain = {name: value for name, value in options.items() if name != "auto_pad"}
    _, by_hand = padded(amounts, merged=merged, **plain)
    expected = qdq_model(by_hand, net.bindings(), factors, tensors=tensors, target=target)
    got, wanted, exact = (run(each, net.data())["y"] for each in (exported.model, expected.model, model))
    np.testing.assert_array_equal(got, wanted)
    assert 10 * np.log10((exact**2).sum() / ((exact - got) ** 2).sum()) > 30


def test_the_model_given_and_placement_exact_keep_their_pads():
    net, model = padded([0, 0, 1, 1, 0, 0, 1, 1])
    factors, tensors = calibrate(net, model)
    assert "Pad" in operators(qdq_model(model, net.bindings(), factors, tensors=tensors, placement="exact").model)
    assert "Pad" in operators(model)
    assert "frame_out" not in plan_tensors(model, net.bindings()).observed


def test_the_means_of_the_padded_input_correct_the_bias():
    net, model = padded([0, 0, 1, 1, 0, 0, 1, 1])
    _, by_hand = padded([0, 0, 1, 1, 0, 0, 1, 1], merged=[1, 1, 1, 1])
    factors, tensors = calibrate(net, model)
    known = {**factors, "second": replace(factors["second"], mean=torch.linspace(-1, 1, 6))}
    files = [qdq_model(each, net.bindings(), known, tensors=tensors).model for each in (model, by_hand)]
    without = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    got, wanted, plain = (run(each, net.data())["y"] for each in (*files, without))
    np.testing.assert_array_equal(got, wanted)
    assert np.any(got != plain)


def other_pad(what):
    """A convolution behind a Pad that it cannot take over."""
    net = Net(opset=18)
    x = net.layer("Conv", "first", net.input("x", 2, 3, 8, 8), net.weight("w1", 4, 3, 1, 1))
    amounts = {"negative": [0, 0, -1, 1, 0, 0, 1, 1], "channels": [0, 1, 1, 1, 0, 1, 1, 1]}.get(what, [0, 0, 1, 1] * 2)
    amounts = net.constant("amounts", np.array(amounts, np.int64))
    if what == "computed":
        amounts = net.add("Mul", "computed", amounts, net.input("times", 1, dtype=TensorProto.INT64))
    value = net.constant("value", np.float32(0.5 if what == "value" else 0))
    x = net.add("Pad", "frame", x, amounts, value, mode="reflect" if what == "reflect" else "constant")
    channels = 6 if what == "channels" else 4
    settings = {"auto_pad": "SAME_UPPER"} if what == "auto_pad" else {}
    net.layer("Conv", "second", x, net.weight("w2", 5, channels, 3, 3), outputs=["y"], **settings)
    if what == "two_readers":
        net.add("Neg", "other", x, outputs=["z"])
    outputs = {"two_readers": ["z"], "output": ["frame_out"]}.get(what, [])
    return net, net.model("y", *outputs)


@pytest.mark.parametrize(
    "what", ["negative", "channels", "computed", "value", "reflect", "auto_pad", "two_readers", "output"]
)
def test_other_pads_stay(what):
    net, model = other_pad(what)
    data = net.data()
    if what == "computed":
        data["times"] = np.ones(1, np.int64)
        net.data = lambda _=1: data
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert "Pad" in operators(exported)
    exact, got = (run(each, data)["y"] for each in (model, exported))
    assert 10 * np.log10((exact**2).sum() / ((exact - got) ** 2).sum()) > 25


@pytest.mark.parametrize("differs", [False, True])
def test_layers_that_share_the_unpadded_tensor_decide_by_their_factors(differs):
    net = Net()
    x = net.layer("Conv", "first", net.input("x", 2, 3, 8, 8), net.weight("w1", 4, 3, 1, 1))
    framed = net.add("Pad", "frame", x, net.constant("amounts", np.array([0, 0, 1, 1] * 2)))
    net.layer("Conv", "second", framed, net.weight("w2", 5, 4, 3, 3), outputs=["y"])
    net.layer("Conv", "third", x, net.weight("w3", 5, 4, 1, 1), outputs=["z"])
    model = net.model("y", "z")
    factors, tensors = calibrate(net, model)
    if differs:
        factors["third"] = changed(factors["third"], scale_d=factors["third"].scale_d * 1.2)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert ("Pad" in operators(exported)) is differs
    quantized = [node.input[0] for node in exported.graph.node if node.op_type == "QuantizeLinear"]
    assert quantized.count("first_out") == 1


def test_a_pad_whose_result_is_a_weight_stays():
    net = Net()
    x = net.input("x", 1, 2, 8, 8)
    kernel = net.add("Pad", "frame", net.input("kernel", 3, 2, 1, 1), net.constant("n", np.array([0, 0, 1, 1] * 2)))
    net.add("Conv", "free", x, kernel, outputs=["mid"])
    net.layer("Conv", "second", "mid", net.weight("w2", 5, 3, 1, 1), outputs=["y"])
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert "Pad" in operators(exported)
