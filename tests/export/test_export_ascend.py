"""The deploy file, executed in true integer arithmetic by an executor of its own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import NETS, Net, calibrate, changed, quantized, recurrent, residual, run_all
from hypothesis import given
from hypothesis import strategies as st
from numpy_nets import AscendExecutor, attributes_of
from onnx import TensorProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.deploy import ascend_model, dequant_param, fake_quant_model, pack_int4

INTEGER_NETS = {name: make for name, make in NETS.items() if not name.startswith(("lstm", "gru"))}


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def both_models(net, model, factors):
    return (build(model, net.bindings(), factors).model for build in (ascend_model, fake_quant_model))


def assert_same_integers(net, deploy, simulated, feeds):
    """Quantized inputs, accumulators and results of every layer, bit for bit."""
    executor = AscendExecutor(deploy)
    results = executor.run(feeds)
    tensors = run_all(onnx.shape_inference.infer_shapes(simulated), feeds)
    nodes = {node.name: node for node in deploy.graph.node}
    for layer, op_type in net.layers.items():
        quantized = executor.tensors[f"{layer}.quant.output0"]
        assert np.array_equal(quantized.values, tensors[f"{layer}.quant.fakequant.clip.output0"]), layer
        accumulator = executor.tensors[nodes[f"{layer}.dequant"].input[0]]
        if op_type != "AveragePool":  # an average is no integer
            multiply = next(node for node in simulated.graph.node if node.name == f"{layer}.fakedequant.mul")
            assert np.array_equal(accumulator.values, tensors[multiply.input[0]]), layer
    for name, result in results.items():
        assert np.array_equal(result, tensors[name]), name


@pytest.mark.parametrize("make", INTEGER_NETS.values(), ids=INTEGER_NETS)
def test_integers_equal_those_of_the_fake_quant_file(make):
    net, model = make()
    factors, _ = calibrate(net, model)
    assert_same_integers(net, *both_models(net, model, factors), net.data(seed=7))


def even_channels():
    """A net whose weights can all be packed to 4 bits."""
    net = Net(seed=8)
    x = net.input("x", 2, 4, 6, 6)
    y = net.layer("Conv", "conv", x, net.weight("w", 6, 4, 3, 3), net.weight("b", 6))
    y = net.layer("ConvTranspose", "up", y, net.weight("up.w", 6, 4, 2, 2), net.weight("up.b", 4), strides=[2, 2])
    y = net.layer("MatMul", "product", y, net.weight("product.w", 8, 3))
    net.add("Add", "bias", y, net.weight("product.b", 3), outputs=["y"])
    return net, net.model("y")


@pytest.mark.parametrize("act_bits", [4, 8])
@pytest.mark.parametrize("wts_bits", [4, 6, 7, 8])
def test_integers_equal_at_every_bit_width(act_bits, wts_bits):
    net, model = even_channels()
    factors, _ = calibrate(net, model, act_bits=act_bits, wts_bits=wts_bits)
    deploy, simulated = both_models(net, model, factors)
    quantizer = next(node for node in deploy.graph.node if node.name == "up.quant")
    assert attributes_of(quantizer)["dst_type"] == f"INT{act_bits}"
    assert initializers(deploy)["up.w"].shape == ((3 if wts_bits == 4 else 6), 4, 2, 2)
    assert_same_integers(net, deploy, simulated, net.data(seed=7))


def test_sixteen_bit_integers_equal_where_float32_is_exact():
    """Sums of 16-bit integers leave the 2^24 that float32 holds exactly; there its rounding is allowed for."""
    net, model = even_channels()
    factors, _ = calibrate(net, model, act_bits=16)
    deploy, simulated = both_models(net, model, factors)
    executor, feeds = AscendExecutor(deploy), net.data(seed=7)
    executor.run(feeds)
    tensors = run_all(onnx.shape_inference.infer_shapes(simulated), feeds)
    quantized = executor.tensors["conv.quant.output0"]
    assert np.array_equal(quantized.values, tensors["conv.quant.fakequant.clip.output0"])
    sums = executor.tensors["conv_out"].values
    largest = np.abs(quantized.centred).max() * 128 * 36
    assert np.abs(sums - tensors["conv_out"]).max() <= 36 * 2**-24 * largest


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_no_float_weight_remains(make):
    net, model = make()
    factors, _ = calibrate(net, model)
    stored = initializers(ascend_model(model, net.bindings(), factors).model)
    weights = {name for name in stored if name.endswith((".w", ".r"))}
    assert weights
    assert {stored[name].dtype for name in weights} == {np.dtype(np.int8)}
    biases = {name for name in stored if name.endswith(".b") and name != "swapped.b"}
    assert {stored[name].dtype for name in biases} <= {np.dtype(np.int32)}


@pytest.mark.parametrize(("weight", "bit"), [("grp.w", 0x40), ("dw.w", 0x40), ("pw.w", 0x01)])
def test_flipping_one_bit_of_a_weight_changes_the_output(weight, bit):
    """The last layer shows the lowest bit; behind others a change must be worth a step of the next quantizer."""
    net, model = NETS["grouped"]()
    factors, _ = calibrate(net, model)
    deploy = ascend_model(model, net.bindings(), factors).model
    feeds = net.data(seed=7)
    expected = AscendExecutor(deploy).run(feeds)["y"]
    tensor = next(tensor for tensor in deploy.graph.initializer if tensor.name == weight)
    raw = bytearray(tensor.raw_data)
    raw[len(raw) // 2] ^= bit
    tensor.raw_data = bytes(raw)
    assert not np.array_equal(AscendExecutor(deploy).run(feeds)["y"], expected)


def test_equal_quantizers_of_one_tensor_are_merged_and_others_are_not():
    net = Net()
    x = net.input("x", 1, 3, 5, 5)
    parts = [net.layer("Conv", name, x, net.weight(f"{name}.w", 4, 3, 3, 3)) for name in "abc"]
    net.add("Sum", "sum", *parts, outputs=["y"])
    model = net.model("y")
    factors, _ = calibrate(net, model)
    factors["c"] = changed(factors["c"], act_bits=16)
    deploy = ascend_model(model, net.bindings(), factors).model
    quantizers = [node.name for node in deploy.graph.node if node.op_type == "AscendQuant"]
    assert sorted(quantizers) == ["a.quant", "c.quant"]
    readers = {node.name: node.input[0] for node in deploy.graph.node if node.op_type == "Conv"}
    assert readers == {"a": "a.quant.output0", "b": "a.quant.output0", "c": "c.quant.output0"}


def test_dequant_parameter_holds_the_bits_of_the_scale():
    param = dequant_param(np.array([1.0, 0.5], dtype=np.float32))
    assert param.dtype == np.uint64
    assert [hex(value) for value in param] == ["0x3f800000", "0x3f000000"]


def test_half_precision_layers_dequantize_to_half():
    net = Net()
    x = net.input("x", 1, 4, 5, 5, dtype=TensorProto.FLOAT16)
    net.layer("Conv", "l", x, net.weight("w", 4, 4, 3, 3, dtype=np.float16), outputs=["y"])
    model = net.model("y", dtype=TensorProto.FLOAT16)
    factors = {"l": quantized(scale_d=0.03, offset_d=3, scale_w=np.full(1, 0.01))}
    deploy = ascend_model(model, net.bindings(), factors).model
    assert attributes_of(deploy.graph.node[-1])["dtype"] == 1


def test_four_bit_activations_add_the_bias_in_float():
    net, model = residual()
    factors, _ = calibrate(net, model, act_bits=4)
    deploy = ascend_model(model, net.bindings(), factors).model
    cast = next(node for node in deploy.graph.node if node.name == "first.bias_quant")
    assert cast.op_type == "Cast"
    assert initializers(deploy)[cast.input[0]].dtype == np.int32
    assert next(node for node in deploy.graph.node if node.name == "first").input[2] == cast.output[0]


def unpack_int4(packed, axis):
    ahead = np.moveaxis(packed, axis, 0)
    both = np.stack([np.left_shift(ahead, 4) >> 4, ahead >> 4], axis=1)
    return np.ascontiguousarray(np.moveaxis(both.reshape(-1, *ahead.shape[1:]), 0, axis))


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=40), st.sampled_from([0, 1, 2]))
def test_packing_is_undone_by_unpacking(values, axis):
    weight = np.array(values[: len(values) // 2 * 2], dtype=np.int8)
    shape = [1, 1, 1]
    shape[axis] = -1
    weight = weight.reshape(shape)
    packed = pack_int4(weight, axis)
    assert packed.shape[axis] * 2 == weight.shape[axis]
    assert np.array_equal(unpack_int4(packed, axis), weight)


def test_packing_puts_the_even_channel_low():
    assert pack_int4(np.array([[1, -2, 7, -8]], dtype=np.int8), 1).view(np.uint8).tolist() == [[0xE1, 0x87]]


def test_four_bit_weights_are_packed_along_the_input_channels():
    net, model = residual()
    factors, _ = calibrate(net, model)
    narrow, _ = calibrate(net, model, wts_bits=4)
    factors |= {name: narrow[name] for name in ("first", "fc")}
    stored = initializers(ascend_model(model, net.bindings(), factors).model)
    assert stored["first.w"].shape == (8, 4, 3, 3)
    assert stored["fc.w"].shape == (4, 5)  # [Cin, Cout] after transB became 0
    assert stored["second.w"].shape == (8, 8, 3, 3)
    assert_same_integers(net, *both_models(net, model, factors), net.data(seed=7))


def test_weights_that_cannot_be_packed_are_refused_by_name():
    net, model = residual()
    factors, _ = calibrate(net, model, wts_bits=4)
    with pytest.raises(ExportError, match='layer "stem": INT4 packs pairs of input channels, got 3'):
        ascend_model(model, net.bindings(), factors)
    net, model = NETS["grouped"]()
    factors, _ = calibrate(net, model, wts_bits=4)
    with pytest.raises(ExportError, match='layer "grp": INT4 weights of a convolution with 2 groups'):
        ascend_model(model, net.bindings(), factors)


# -- recurrent layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_become_ascend_s_own(kind, state, bits):
    net, model = recurrent(kind, state)
    factors, _ = calibrate(net, model, act_bits=bits)
    deploy = ascend_model(model, net.bindings(), factors).model
    node = next(node for node in deploy.graph.node if node.name == "rnn")
    assert node.op_type == f"Basic{kind}InplaceFillWindowCache"
    states = {"LSTM": ["h", "c"], "GRU": ["h"]}[kind] if state else [""] * (2 if kind == "LSTM" else 1)
    assert list(node.input) == ["x", "rnn.w", "rnn.r", *states, "rnn.b", "", "", "rnn.dequant.param"]
    settings = attributes_of(node)
    assert settings["quant_dtype"] == {8: 2, 16: 6}[bits]
    assert settings["quant_scale_x"] == np.float32(1) / np.float32(factors["rnn"].scale_d)
    assert settings["quant_offset_h"] == factors["rnn"].hidden.zero_point
    assert (settings["quant_sqrt_mode_x"], settings["quant_sqrt_mode_h"]) == (0, 0)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_integers_times_scales_are_the_fake_quant_weights(kind):
    net, model = recurrent(kind)
    factors, _ = calibrate(net, model)
    deploy, simulated = both_models(net, model, factors)
    integer, real = initializers(deploy), initializers(simulated)
    rows = integer["rnn.w"].shape[1]
    scale = integer["rnn.dequant.param"].astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(
        integer["rnn.w"][0].astype(np.float32) * factors["rnn"].scale_w.reshape(-1, 1), real["rnn.w"][0]
    )
    np.testing.assert_array_equal(
        integer["rnn.r"][0].astype(np.float32) * factors["rnn"].weights[1].scale.numpy().reshape(-1, 1),
        real["rnn.r"][0],
    )
    np.testing.assert_array_equal(scale[:rows], factors["rnn"].scale_w * np.float32(factors["rnn"].scale_d))
    np.testing.assert_array_equal(
        scale[rows:], factors["rnn"].weights[1].scale.numpy() * np.float32(factors["rnn"].hidden.step)
    )
    np.testing.assert_allclose(integer["rnn.b"][0] * scale, real["rnn.b"][0], rtol=2**-23)


def test_scales_per_gate_are_repeated_for_each_row():
    net, model = recurrent("LSTM")
    factors, _ = calibrate(net, model)
    per_gate = np.array([0.01, 0.02, 0.03, 0.04], dtype=np.float32)
    factors["rnn"] = changed(factors["rnn"], scale_w=per_gate, scale_r=per_gate, scale_d=1.0)
    scale = initializers(ascend_model(model, net.bindings(), factors).model)["rnn.dequant.param"]
    np.testing.assert_array_equal(scale.astype(np.uint32).view(np.float32)[:24], np.repeat(per_gate, 6))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("LSTM", {"layout": 1}, "layout is 1"),
        ("LSTM", {"activations": ["Tanh", "Tanh", "Tanh"]}, "activations"),
        ("GRU", {"linear_before_reset": 0}, "linear_before_reset is 0"),
    ],
)
def test_forms_that_ascend_lacks_are_refused(kind, change, words):
    net, model = recurrent(kind)
    factors, _ = calibrate(net, model)
    node = next(node for node in model.graph.node if node.op_type == kind)
    for name, value in change.items():
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])
    with pytest.raises(ExportError, match=f'layer "rnn": .* cannot compute it: .*{words}'):
        ascend_model(model, net.bindings(), factors)


def test_four_bit_states_and_peepholes_are_refused():
    net, model = recurrent("LSTM")
    factors, _ = calibrate(net, model, act_bits=4)
    with pytest.raises(ExportError, match="its activation has 4 bits"):
        ascend_model(model, net.bindings(), factors)
    factors, _ = calibrate(net, model)
    node = next(node for node in model.graph.node if node.op_type == "LSTM")
    node.input.append("rnn.b")
    with pytest.raises(ExportError, match="peephole weights"):
        ascend_model(model, net.bindings(), factors)
