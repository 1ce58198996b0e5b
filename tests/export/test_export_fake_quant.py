"""The fake-quant file: integers inside, close to an independent NumPy simulation, runnable everywhere."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import (
    NETS,
    Net,
    calibrate,
    changed,
    quantized,
    residual,
    run,
    run_all,
    tensor_factors,
    transposed,
    weight_scales,
)
from numpy_nets import FakeQuantReference
from onnx import TensorProto, numpy_helper

from amct.errors import ExportError
from amct.export.deploy import fake_quant_model

QUANTIZER_PARTS = ("scale", "offset", "min_val", "max_val", "mul", "round", "add", "clip", "sub")


def reference(net, model, factors, feeds):
    return FakeQuantReference(model, factors, {f"node_{name}": name for name in net.layers}).run(feeds)


def every_tensor(model, feeds):
    return run_all(onnx.shape_inference.infer_shapes(model), feeds)


def test_a_vector_stays_a_vector():
    net = Net()
    net.layer("MatMul", "fc", net.input("x", 8), net.weight("w", 8, 4), outputs=["y"])
    model = net.model("y")
    factors, _ = calibrate(net, model)
    exported = fake_quant_model(model, net.bindings(), factors).model
    expected, got = (run(each, net.data())["y"] for each in (model, exported))
    assert got.shape == expected.shape == (4,)
    np.testing.assert_allclose(got, expected, atol=0.05)


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_it_agrees_with_numpy_up_to_rounding_at_halves(make):
    net, model = make()
    factors, _ = calibrate(net, model)
    exported = fake_quant_model(model, net.bindings(), factors)
    onnx.checker.check_model(exported.model, full_check=True)
    feeds = net.data(seed=7)
    values, bounds = reference(net, model, factors, feeds)
    for name, result in run(exported.model, feeds).items():
        assert np.all(np.abs(result - values[name]) <= bounds[name])


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_layers_compute_on_integers(make):
    """Every quantizer yields integers of its range, every layer integers from them (float32 is exact below 2^24)."""
    net, model = make()
    factors, _ = calibrate(net, model)
    exported = fake_quant_model(model, net.bindings(), factors).model
    tensors = every_tensor(exported, net.data(seed=7))
    for name, op_type in net.layers.items():
        if op_type in ("LSTM", "GRU"):
            continue
        integers = tensors[f"{name}.quant.fakequant.clip.output0"]
        assert np.array_equal(integers, np.rint(integers))
        assert integers.min() >= -128
        assert integers.max() <= 127
        multiply = next(node for node in exported.graph.node if node.name == f"{name}.fakedequant.mul")
        sums = tensors[multiply.input[0]]
        if op_type != "AveragePool":
            assert np.array_equal(sums, np.rint(sums))


@pytest.mark.parametrize("bits", [8, 16])
def test_quantizer_clips_at_the_range_of_its_bits(bits):
    net, model = residual()
    factors, _ = calibrate(net, model, act_bits=bits)
    exported = fake_quant_model(model, net.bindings(), factors).model
    tensors = every_tensor(exported, {"x": net.data()["x"] * 100})
    integers = tensors["stem.quant.fakequant.clip.output0"]
    assert (integers.min(), integers.max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("make", [residual, NETS["linear"], NETS["lstm"]], ids=["residual", "linear", "lstm"])
def test_sixteen_bit_activations_agree_with_numpy(make):
    net, model = make()
    factors, _ = calibrate(net, model, act_bits=16)
    feeds = net.data(seed=7)
    values, bounds = reference(net, model, factors, feeds)
    result = run(fake_quant_model(model, net.bindings(), factors).model, feeds)["y"]
    assert np.all(np.abs(result - values["y"]) <= bounds["y"])


@pytest.mark.parametrize("bits", [4, 6, 7])
def test_weights_of_fewer_bits_hold_only_their_integers(bits):
    net, model = residual()
    factors, _ = calibrate(net, model, wts_bits=bits)
    exported = fake_quant_model(model, net.bindings(), factors).model
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in exported.graph.initializer}
    assert weights["first.w"].min() >= -(2 ** (bits - 1))
    assert weights["first.w"].max() == 2 ** (bits - 1) - 1
    feeds = net.data(seed=7)
    values, bounds = reference(net, model, factors, feeds)
    assert np.all(np.abs(run(exported, feeds)["y"] - values["y"]) <= bounds["y"])


def test_layers_that_share_a_tensor_and_its_factors_share_a_quantizer():
    net = Net()
    x = net.input("x", 1, 3, 5, 5)
    a = net.layer("Conv", "a", x, net.weight("a.w", 4, 3, 3, 3))
    b = net.layer("Conv", "b", x, net.weight("b.w", 4, 3, 3, 3))
    net.add("Add", "sum", a, b, outputs=["y"])
    model = net.model("y")
    factors, _ = calibrate(net, model)
    names = {node.name for node in fake_quant_model(model, net.bindings(), factors).model.graph.node}
    assert "a.quant.fakequant.round" in names
    assert "b.quant.fakequant.round" not in names
    factors["b"] = changed(factors["b"], offset_d=factors["b"].input.zero_point + 1)
    names = {node.name for node in fake_quant_model(model, net.bindings(), factors).model.graph.node}
    assert "b.quant.fakequant.round" in names


def balanced(net, model, names, seed=0):
    """Factors with DMQ: random balance, and scales that fit the balanced input and weight."""
    random = np.random.default_rng(seed)
    factors, tensors = calibrate(net, model)
    values = run_all(model, net.data())
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    for name in names:
        node = nodes[f"node_{name}"]
        x, w = values[node.input[0]], arrays[node.input[1]]
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        balance = np.exp(random.uniform(-1, 1, x.shape[1])).astype(np.float32)
        shape = (1, -1, *[1] * (x.ndim - 2))
        data = tensor_factors(x / balance.reshape(shape))
        if node.op_type == "ConvTranspose":
            heavier = w * balance.reshape(-1, *[1] * (w.ndim - 1))
            per_group = heavier.reshape(groups, w.shape[0] // groups, w.shape[1], -1)
            rows = np.swapaxes(per_group, 1, 2).reshape(groups * w.shape[1], -1)
        elif node.op_type == "Conv":
            per_filter = np.repeat(balance.reshape(groups, -1), w.shape[0] // groups, 0)
            rows = (w * per_filter.reshape(w.shape[0], w.shape[1], *[1] * (w.ndim - 2))).reshape(w.shape[0], -1)
        else:
            rows = w * balance
        factors[name] = quantized(
            scale_d=data.step, offset_d=data.zero_point, scale_w=weight_scales(rows), balance=balance
        )
    return factors, tensors


@pytest.mark.parametrize("make", [residual, NETS["grouped"], transposed], ids=["residual", "grouped", "transposed"])
def test_balance_factors_divide_the_input_and_multiply_the_weight(make):
    """With DMQ the file still computes the float net, up to quantization: a wrong side or axis would show at once."""
    net, model = make()
    factors, _ = balanced(net, model, [name for name, kind in net.layers.items()])
    exported = fake_quant_model(model, net.bindings(), factors)
    assert sum(node.name.endswith(".tensor_balance_factor") for node in exported.model.graph.node) == len(net.layers)
    feeds = net.data()
    expected, result = run(model, feeds)["y"], run(exported.model, feeds)["y"]
    assert np.abs(result - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("op_type", "dtype"),
    [("Conv", np.float16), ("AveragePool", np.float16), ("MatMul", np.float16), ("MatMul", np.float64)],
)
def test_other_precisions_are_cast_around_the_layer(op_type, dtype):
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    net = Net()
    x = net.input("x", 2, 4, 6, 6, dtype=kind)
    if op_type == "Conv":
        net.layer(
            "Conv", "l", x, net.weight("w", 4, 4, 3, 3, dtype=dtype), net.weight("b", 4, dtype=dtype), outputs=["y"]
        )
    elif op_type == "MatMul":
        product = net.layer("MatMul", "l", x, net.weight("w", 6, 5, dtype=dtype))
        net.add("Add", "bias", product, net.weight("b", 5, dtype=dtype), outputs=["y"])
    else:
        net.layer("AveragePool", "l", x, kernel_shape=[2, 2], outputs=["y"])
    model = net.model("y", dtype=kind)
    factors = {"l": quantized(scale_d=0.03, offset_d=3, scale_w=np.full(1, 1.0 if op_type == "AveragePool" else 0.01))}
    exported = fake_quant_model(model, net.bindings(), factors).model
    onnx.checker.check_model(exported, full_check=True)
    casts = [node for node in exported.graph.node if node.op_type == "Cast"]
    assert [node.name for node in casts] == ["l.quant.fakequant.cast", "l.fakedequant.cast"]
    if (op_type, dtype) == ("AveragePool", np.float16):
        return  # onnxruntime cannot run the float model either
    feeds = net.data()
    expected, result = run(model, feeds)["y"], run(exported, feeds)["y"]
    assert result.dtype == dtype
    # Input and weight are off by half a step each: 36 products of |x| < 4 and |w| < 1 at most.
    assert np.abs(result.astype(float) - expected).max() < 36 * (0.015 * 1 + 0.005 * 4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_half_precision_recurrent_layers_stay_half(kind):
    gates = {"LSTM": 4, "GRU": 3}[kind]
    half = {"dtype": np.float16}
    net = Net()
    x, h = (net.input(name, *shape, dtype=TensorProto.FLOAT16) for name, shape in (("x", (3, 2, 5)), ("h", (1, 2, 4))))
    states = [h, net.input("c", 1, 2, 4, dtype=TensorProto.FLOAT16)] if kind == "LSTM" else [h]
    weights = [net.weight("w", 1, gates * 4, 5, **half), net.weight("r", 1, gates * 4, 4, **half)]
    net.layer(
        kind, "rnn", x, *weights, net.weight("b", 1, gates * 8, **half), "", *states, hidden_size=4, outputs=["y"]
    )
    model = net.model("y", dtype=TensorProto.FLOAT16)
    one = np.full(1, 0.01)
    factors = quantized(scale_d=0.03, offset_d=0, scale_w=one, scale_h=0.02, offset_h=0, scale_r=one)
    exported = fake_quant_model(model, net.bindings(), {"rnn": factors}).model
    onnx.checker.check_model(exported, full_check=True)  # types agree; onnxruntime has no half LSTM on the CPU
    node = next(node for node in exported.graph.node if node.op_type == kind)
    assert node.input[0] == "rnn.anti_quant.fake_antiquant.cast.output0"
    assert node.input[5] == "rnn.anti_quant1.fake_antiquant.cast.output0"


def test_layers_without_factors_stay_float_and_are_named():
    net, model = residual()
    factors, _ = calibrate(net, model)
    del factors["second"]
    exported = fake_quant_model(model, net.bindings(), factors)
    assert [(skip.layer, skip.reason) for skip in exported.skipped] == [("second", "it has no quantization factors")]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in exported.model.graph.initializer}
    original = next(tensor for tensor in model.graph.initializer if tensor.name == "second.w")
    assert np.array_equal(weights["second.w"], numpy_helper.to_array(original))


def test_the_model_given_is_not_changed():
    net, model = residual()
    factors, _ = calibrate(net, model)
    before = model.SerializeToString()
    fake_quant_model(model, net.bindings(), factors)
    assert model.SerializeToString() == before


def test_the_report_names_what_was_inserted():
    net, model = residual()
    factors, _ = calibrate(net, model)
    exported = fake_quant_model(model, net.bindings(), factors)
    report = exported.layers[0]
    assert (report.layer, report.kind, report.operator) == ("stem", "conv", "Conv")
    assert set(report.inserted) == {
        *(f"stem.quant.fakequant.{part}" for part in QUANTIZER_PARTS),
        "stem.fakedequant.dqscale",
        "stem.fakedequant.mul",
    }


def test_a_bias_that_leaves_int32_is_refused_with_the_layer_s_name():
    net, model = residual()
    factors, _ = calibrate(net, model)
    factors["first"] = changed(factors["first"], scale_d=1e-7, scale_w=np.full(1, 1e-7))
    with pytest.raises(ExportError, match='layer "first": the bias does not fit int32'):
        fake_quant_model(model, net.bindings(), factors)
