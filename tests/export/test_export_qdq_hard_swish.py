"""Hard swishes in the fast QDQ file: ranges end where the activation does, and values are rounded only where needed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from export_nets import Net, calibrate, run
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from amct.export.onnx.graph import OnnxGraph
from amct.export.qdq import placement
from amct.export.qdq.exporter import plan_tensors, qdq_model
from amct.export.qdq.tensor_values import raised_to, without_effect_below
from amct.numerics.qparams import QParams


def operator(net, x):
    return net.add("HardSwish", "swish", x)


def gate_operator(net, x):
    return net.add("Mul", "swish", x, net.add("HardSigmoid", "gate", x, alpha=1 / 6, beta=0.5))


def written_out(net, x):
    """As PaddlePaddle writes it: x · clip(x + 3, 0, 6) / 6."""
    three, six = net.constant("three", np.float32(3)), net.constant("six", np.full((1,), 6, np.float32))
    gate = net.add("Clip", "gate", net.add("Add", "moved", x, three), net.constant("zero", np.float32(0)), "six_limit")
    net.constant("six_limit", np.float32(6))
    return net.add("Div", "swish", net.add("Mul", "product", x, gate), six)


def swish(net, x):
    """x · sigmoid(x)."""
    return net.add("Mul", "swish", x, net.add("Sigmoid", "gate", x))


def gelu(net, x):
    """As exporters write it before opset 20: x · (1 + erf(x / √2)) / 2."""
    root, one = net.constant("root", np.float32(np.sqrt(2))), net.constant("one", np.float32(1))
    erf = net.add("Erf", "erf", net.add("Div", "scaled", x, root))
    product = net.add("Mul", "product", x, net.add("Add", "gate", erf, one))
    return net.add("Mul", "swish", product, net.constant("half", np.float32(0.5)))


FORMS = {"HardSwish": operator, "HardSigmoid": gate_operator, "Add, Clip, Mul, Div": written_out}


SOFT = {"swish": (swish, -7.0), "GELU": (gelu, -3.5)}


def network(form):
    net = Net()
    first = net.layer("Conv", "first", net.input("x", 1, 3, 8, 8), net.weight("w1", 8, 3, 3, 3, spread=12.0))
    net.layer("Conv", "second", form(net, first), net.weight("w2", 4, 8, 3, 3), outputs=["y"])
    return net, net.model("y")


def step(model, tensor):
    """The step of a quantized tensor."""
    return next(
        float(numpy_helper.to_array(each)) for each in model.graph.initializer if each.name == f"{tensor}.scale"
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_range_of_a_convolution_begins_where_its_hard_swish_does(form, monkeypatch):
    net, model = network(form)
    factors, tensors = calibrate(net, model)
    low, high = ((limit - tensors["first_out"].zero_point) * tensors["first_out"].step for limit in (-128, 127))
    assert low < -10
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert step(exported, "first_out") == pytest.approx((high + 3) / 254, rel=1e-5)
    monkeypatch.setattr(placement, "without_effect_below", lambda *_: None)
    whole_range = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    expected, raised, whole = (run(each, net.data())["y"].astype(np.float64) for each in (model, exported, whole_range))
    assert ((expected - raised) ** 2).sum() < ((expected - whole) ** 2).sum()


@pytest.mark.parametrize(("form", "floor"), SOFT.values(), ids=SOFT)
def test_soft_activations_are_next_to_zero_below_their_floor(form, floor, monkeypatch):
    net, model = network(form)
    assert without_effect_below(OnnxGraph(model), "first_out") == pytest.approx(floor)
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    monkeypatch.setattr(placement, "without_effect_below", lambda *_: None)
    whole_range = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert step(exported, "first_out") < 0.8 * step(whole_range, "first_out")
    expected, raised, whole = (run(each, net.data())["y"].astype(np.float64) for each in (model, exported, whole_range))
    assert ((expected - raised) ** 2).sum() < ((expected - whole) ** 2).sum()
    net.add("Neg", "other", "first_out")
    assert without_effect_below(OnnxGraph(net.model("y", "other_out")), "first_out") is None


def test_what_is_lost_below_a_floor_is_less_than_half_a_step():
    """A range from the floor to zero has the smallest step that there is with this floor."""
    low = np.linspace(-60, 0, 60_001)
    gate = {"swish": 1 / (1 + np.exp(-low)), "GELU": np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in low])}
    for name, (_, floor) in SOFT.items():
        values, at_floor = low * gate[name], np.interp(floor, low, low * gate[name])
        assert np.abs(values[low < floor] - at_floor).max() < -floor / 255 / 2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_readers_need_the_whole_range(form):
    net, model = network(form)
    assert without_effect_below(OnnxGraph(model), "first_out") == pytest.approx(-3)
    assert without_effect_below(OnnxGraph(net.model("y", "first_out")), "first_out") is None
    net.add("Neg", "other", "first_out")
    assert without_effect_below(OnnxGraph(net.model("y", "other_out")), "first_out") is None


def test_values_in_front_of_a_float_operator_are_not_rounded_once_more():
    net, model = network(written_out)
    assert not {"product_out", "gate_out", "moved_out"} & set(plan_tensors(model, net.bindings()).observed)
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert set(exported.tensors) == {"x", "first_out", "swish_out", "y"}


def test_a_constant_factor_in_front_of_a_layer_is_no_second_rounding():
    """The product has the integers of the layer's input, because the step in front of it is half of that."""
    net = Net()
    first = net.layer("Conv", "first", net.input("x", 1, 3, 8, 8), net.weight("w1", 8, 3, 3, 3))
    double = net.add("Mul", "double", first, net.constant("two", np.float32(2)))
    net.layer("Conv", "second", double, net.weight("w2", 4, 8, 3, 3), outputs=["y"])
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert step(exported, "first_out") == pytest.approx(factors["second"].scale_d / 2, rel=1e-6)


@given(scale=st.floats(1e-3, 10), zero_point=st.integers(-128, 127), floor=st.floats(-500, 0, allow_subnormal=False))
def test_a_raised_range_has_its_floor_zero_and_the_same_top(scale, zero_point, floor):
    factors = QParams.of(scale, zero_point)
    raised = raised_to(factors, floor)
    low, high = ((limit - raised.zero_point) * raised.step for limit in (-128, 127))
    slack = 1e-6 * (high - low)
    assert high >= (127 - zero_point) * scale - slack
    assert raised.step <= scale * (1 + 1 / 254) + slack
    if raised != factors:
        assert low <= floor + slack
        assert low >= floor - raised.step - slack
        assert -128 <= raised.zero_point <= 127
