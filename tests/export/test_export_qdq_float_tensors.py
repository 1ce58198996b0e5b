"""Which tensors between layers the fast QDQ file leaves float, and that the layers stay quantized."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import Net, calibrate, changed, recurrent, residual, run, transposed
from onnx import numpy_helper
from transformer_nets import NORMALIZATIONS, TOKENS, audio_encoder, vision_transformer

from amct.export.deploy import fake_quant_model
from amct.export.formats import ExportRequest, export
from amct.export.onnx.graph import OnnxGraph
from amct.export.qdq.exporter import plan_tensors, qdq_model
from amct.export.qdq.tensor_values import residual_streams
from amct.export.request import ExportOptions


def sqnr(expected, result):
    """Signal-to-noise ratio in dB."""
    noise = np.square(expected.astype(np.float64) - result).sum()
    return 10 * np.log10(np.square(expected.astype(np.float64)).sum() / noise)


def quantized_outputs(model):
    """The operators whose outputs are quantized, by tensor."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    return {node.input[0]: makers.get(node.input[0]) for node in model.graph.node if node.op_type == "QuantizeLinear"}


def model_with_output(model, tensor):
    """A copy of a model with one more output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))
    return copy


def float_readers(model, tensor):
    """The operators that read a tensor without a quantizer."""
    return {node.op_type for node in model.graph.node if tensor in node.input} - {"QuantizeLinear"}


# -- tensors that the user requests in float ---------------------------------------------------------------------------


def test_requested_tensors_stay_float_and_layers_still_read_them_quantized():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    wanted = frozenset({"join_out", "join_relu_out", "stem_relu_out"})
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, float_tensors=wanted)
    assert not {"join_out", "join_relu_out", "stem_out"} & set(exported.tensors)
    assert float_readers(exported.model, "stem_relu_out") == {"Add"}
    reasons = {skip.layer: skip.reason for skip in exported.skipped}
    assert reasons["stem_relu_out"].startswith("it was requested in float; ")
    assert {report.layer for report in exported.layers} == set(net.layers)
    layer_inputs = [node.input[0] for node in exported.model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert all(name.endswith("dequantize.output0") for name in layer_inputs)
    feeds = net.data()
    assert sqnr(run(model, feeds)["y"], run(exported.model, feeds)["y"]) > 25


def test_float_tensors_are_an_option_of_every_save():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    options = ExportOptions(float_tensors=frozenset({"second_out"}))
    request = ExportRequest(model=model, bindings=net.bindings(), qparams=factors, tensors=tensors, options=options)
    exported = export("qdq", request)
    assert "second_out" not in exported.tensors
    assert [skip.layer for skip in exported.skipped] == ["second_out"]


# -- residual streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
def test_a_residual_stream_in_front_of_a_normalization_stays_float(norm):
    net, model = vision_transformer(norm)
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    quantized = quantized_outputs(exported.model)
    assert not {"patch_out", "flat_out", "tokens_out", "with_class_out", "positioned_out"} & set(quantized)
    assert "Add" not in {operator for tensor, operator in quantized.items() if ".sum" in tensor}
    assert [(skip.layer, skip.reason) for skip in exported.skipped if skip.layer == "patch_out"] == [
        (
            "patch_out",
            "it is part of a residual stream that a normalization reads; onnxruntime computes convolution "
            '"patch" in float',
        )
    ]
    assert {report.layer for report in exported.layers} == set(net.layers)
    assert "patch_out" not in plan_tensors(model, net.bindings()).observed


@pytest.mark.parametrize("make", [vision_transformer, audio_encoder])
def test_the_file_of_a_transformer_is_within_one_decibel_of_the_simulation(make):
    """Target exact8 has the integers of the record, as the simulation: nothing else may add noise."""
    net, model = make()
    factors, tensors = calibrate(net, model)
    feeds = net.data(seed=2)
    expected = run(model, feeds)["y"]
    simulated = sqnr(expected, run(fake_quant_model(model, net.bindings(), factors).model, feeds)["y"])
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target="exact8")
    assert sqnr(expected, run(exported.model, feeds)["y"]) > simulated - 1


def test_the_stream_of_a_transformer_starts_at_the_layer_before_its_activation():
    _, model = audio_encoder()
    streams = residual_streams(OnnxGraph(model))
    assert {"conv2_out", "conv2_gelu_out", "positioned_out", "b2.sum2_out"} <= streams
    assert not {"conv1_out", "conv1_gelu_out", "b1.q_out", "b1.norm1_out"} & streams


def test_a_sum_that_no_normalization_reads_is_no_stream():
    _, model = residual()
    assert residual_streams(OnnxGraph(model)) == frozenset()


def test_a_convolution_in_front_of_a_normalization_is_no_stream():
    net = Net()
    y = net.layer("Conv", "conv", net.input("x", 1, 3, 6, 6), net.weight("w", 4, 3, 3, 3))
    scale, shift = net.constant("s", np.ones(4, np.float32)), net.constant("b", np.zeros(4, np.float32))
    y = net.add("Relu", "relu", net.add("InstanceNormalization", "norm", y, scale, shift))
    net.layer("Conv", "next", y, net.weight("next.w", 4, 4, 1, 1), outputs=["y"])
    assert residual_streams(OnnxGraph(net.model("y"))) == frozenset()


def test_a_convolution_that_is_added_to_a_stream_runs_in_integers():
    """ConvNeXt: its output is rounded once, in steps of its own; the stream and what starts it stay float."""
    net = Net()
    scale, shift = net.constant("s", np.ones(4, np.float32)), net.constant("b", np.zeros(4, np.float32))
    gamma = net.constant("gamma", np.full((1, 4, 1, 1), 0.5, np.float32))
    x = net.layer("Conv", "stem", net.input("x", 1, 3, 6, 6), net.weight("stem.w", 4, 3, 3, 3))
    for name in ("one", "two"):
        y = net.add("InstanceNormalization", f"{name}_norm", x, scale, shift)
        y = net.layer("Conv", f"{name}_wide", y, net.weight(f"{name}_wide.w", 8, 4, 1, 1))
        y = net.layer("Conv", name, net.add("Relu", f"{name}_relu", y), net.weight(f"{name}.w", 4, 8, 1, 1))
        x = net.add("Add", f"{name}_sum", x, net.add("Mul", f"{name}_scaled", y, gamma))
    net.add("InstanceNormalization", "last", x, scale, shift, outputs=["y"])
    model = net.model("y")
    streams = residual_streams(OnnxGraph(model))
    assert {"stem_out", "one_sum_out", "two_sum_out"} <= streams
    assert not {"one_out", "two_out"} & streams
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target="exact8")
    assert {"one_out", "two_out"} <= set(exported.tensors)
    feeds = net.data(seed=2)
    expected = run(model, feeds)["y"]
    simulated = sqnr(expected, run(fake_quant_model(model, net.bindings(), factors).model, feeds)["y"])
    assert sqnr(expected, run(exported.model, feeds)["y"]) > simulated - 1


def test_a_convolution_that_starts_a_stream_through_a_normalization_stays_float():
    """SegFormer: each stage begins with a normalized convolution; one that is only added is in integers."""
    net = Net()
    scale, shift = net.constant("s", np.ones(4, np.float32)), net.constant("b", np.zeros(4, np.float32))
    x = net.layer("Conv", "patches", net.input("x", 1, 3, 6, 6), net.weight("patches.w", 4, 3, 3, 3))
    x = net.add("InstanceNormalization", "first_norm", net.add("Identity", "moved", x), scale, shift)
    y = net.add("InstanceNormalization", "norm", x, scale, shift)
    y = net.layer("Conv", "branch", y, net.weight("branch.w", 4, 4, 1, 1))
    x = net.add("Add", "sum", x, net.add("InstanceNormalization", "branch_norm", y, scale, shift))
    y = net.add("InstanceNormalization", "last_norm", x, scale, shift)
    net.layer("Conv", "head", y, net.weight("head.w", 4, 4, 1, 1), outputs=["y"])
    model = net.model("y")
    streams = residual_streams(OnnxGraph(model))
    assert {"patches_out", "moved_out", "first_norm_out", "sum_out"} <= streams
    assert not {"branch_out", "last_norm_out"} & streams
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert "branch_out" in exported.tensors
    assert not {"patches_out", "moved_out"} & set(exported.tensors)


def test_a_gate_computed_from_means_is_no_normalization():
    """Squeeze and excitation multiplies values by a function of their means that is no statistic of them."""
    net = Net()
    x = net.layer("Conv", "conv", net.input("x", 1, 3, 6, 6), net.weight("w", 3, 3, 1, 1))
    gate = net.layer("Conv", "gate", net.add("ReduceMean", "mean", x, axes=[2, 3]), net.weight("g", 3, 3, 1, 1))
    y = net.add("Mul", "gated", x, net.add("Sigmoid", "sigmoid", gate))
    net.add("Add", "sum", x, y, outputs=["y"])
    assert residual_streams(OnnxGraph(net.model("y"))) == frozenset()


def test_a_normalization_after_a_sum_keeps_the_sum_float():
    """BERT: the sum of a block is normalized, and the result is the start of the next sum."""
    net = Net()
    x = net.layer("MatMul", "first", net.input("x", 1, 4, 16), net.weight("first.w", 16, 16))
    y = net.add("Add", "sum", x, net.layer("MatMul", "second", x, net.weight("second.w", 16, 16)))
    net.add("LayerNormalization", "norm", y, net.constant("w", np.ones(16, np.float32)), outputs=["y"])
    assert residual_streams(OnnxGraph(net.model("y"))) == {"sum_out", "first_out", "second_out"}


# -- partial sums ------------------------------------------------------------------------------------------------------


def branches(count):
    """A block of MobileOne before its branches are merged: a sum of convolutions of one input."""
    net = Net(seed=9)
    x = net.layer("Conv", "stem", net.input("x", 1, 3, 12, 12), net.weight("stem.w", 16, 3, 3, 3))
    total = x
    for index in range(count):
        y = net.layer("Conv", f"branch{index}", x, net.weight(f"b{index}.w", 16, 16, 3, 3, spread=0.5), pads=[1] * 4)
        total = net.add("Add", f"sum{index}", total, y)
    y = net.add("Relu", "relu", total)
    net.layer("Conv", "next", y, net.weight("next.w", 8, 16, 1, 1), outputs=["y"])
    return net, net.model("y")


def test_a_sum_of_many_branches_is_rounded_once():
    net, model = branches(4)
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target="exact8")
    quantized = quantized_outputs(exported.model)
    assert not {"sum0_out", "sum1_out", "sum2_out", "sum3_out"} & set(quantized)
    assert {"relu_out", "branch0_out", "branch3_out", "stem_out"} <= set(quantized)
    assert "sum1_out" not in plan_tensors(model, net.bindings()).observed
    # On the calibration batch, where nothing is clipped, the file has one rounding of each addend more than the
    # simulation, of variance step²/12; a rounded partial sum would add a multiple of them all.
    feeds = net.data()
    simulated = run(model_with_output(fake_quant_model(model, net.bindings(), factors).model, "sum3_out"), feeds)
    result = run(model_with_output(exported.model, "sum3_out"), feeds)
    steps = [tensors[name].step for name in ("stem_out", *(f"branch{index}_out" for index in range(4)))]
    noise = np.square(result["sum3_out"] - simulated["sum3_out"]).mean()
    assert noise < 1.2 * sum(step**2 / 12 for step in steps)


def test_a_sum_of_two_branches_stays_integer():
    net, model = branches(1)
    factors, tensors = calibrate(net, model)
    assert "relu_out" in qdq_model(model, net.bindings(), factors, tensors=tensors).tensors
    assert plan_tensors(model, net.bindings()).observed == ("branch0_out", "y")


# -- probabilities -----------------------------------------------------------------------------------------------------


def probabilities(count):
    """Attention over ``count`` positions without layers: the product of a Softmax with values."""
    net = Net()
    x = net.input("x", 1, count, 8)
    y = net.layer("MatMul", "v", x, net.weight("v.w", 8, 8))
    soft = net.add("Softmax", "soft", net.add("MatMul", "scores", x, net.add("Transpose", "t", x, perm=[0, 2, 1])))
    net.add("MatMul", "context", net.add("Identity", "dropped", soft), y, outputs=["y"])
    return net, net.model("y")


@pytest.mark.parametrize(("count", "is_quantized"), [(8, True), (27, True), (28, False), (200, False)])
def test_probabilities_of_many_alternatives_stay_float(count, is_quantized):
    """√12 · 255 / n is 30 dB at n = 27.9."""
    net, model = probabilities(count)
    factors, tensors = calibrate(net, model)
    observed = {name: each for name, each in tensors.items() if name not in ("soft_out", "dropped_out")}
    quantized = quantized_outputs(qdq_model(model, net.bindings(), factors, tensors=observed).model)
    assert ("dropped_out" in quantized or "soft_out" in quantized) == is_quantized


def test_observed_probabilities_decide_by_their_own_step():
    net, model = probabilities(TOKENS)
    factors, tensors = calibrate(net, model)
    fine = {
        **tensors,
        **{name: tensors[name].moved(1e-3, tensors[name].zero_point) for name in ("soft_out", "dropped_out")},
    }
    assert "soft_out" in plan_tensors(model, net.bindings()).observed
    assert "dropped_out" in quantized_outputs(qdq_model(model, net.bindings(), factors, tensors=fine).model)


def test_probabilities_of_an_unknown_number_of_alternatives_stay_float():
    net, model = probabilities(8)
    factors, tensors = calibrate(net, model)
    del model.graph.value_info[:]
    quantized = quantized_outputs(qdq_model(model, net.bindings(), factors, tensors=tensors).model)
    assert not {"soft_out", "dropped_out"} & set(quantized)


# -- layers without integer kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "operator"),
    [(transposed, "ConvTranspose"), (lambda: recurrent("LSTM"), "LSTM"), (lambda: recurrent("GRU"), "GRU")],
    ids=["ConvTranspose", "LSTM", "GRU"],
)
def test_layers_without_an_integer_kernel_stay_float_with_the_reason(make, operator):
    net, model = make()
    factors, tensors = calibrate(net, model)
    names = [name for name, kind in net.layers.items() if kind == operator]
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    skipped = {skip.layer: skip.reason for skip in exported.skipped}
    assert set(names) <= set(skipped)
    assert f"onnxruntime has no integer kernel for {operator}" in skipped[names[0]]
    weights = {tensor.name for tensor in exported.model.graph.initializer}
    nodes = [node for node in exported.model.graph.node if node.op_type == operator]
    assert all(set(node.input[1:3]) <= weights for node in nodes)
    assert {report.layer for report in exported.layers} == set(net.layers) - set(names)
    exact = qdq_model(model, net.bindings(), factors, placement="exact")
    assert {report.layer for report in exact.layers} == set(net.layers)


def test_a_convolution_in_front_of_a_float_layer_keeps_the_step_of_the_record():
    net = Net()
    y = net.layer("Conv", "conv", net.input("x", 1, 3, 6, 6), net.weight("w", 4, 3, 3, 3))
    net.layer("ConvTranspose", "up", y, net.weight("up.w", 4, 2, 2, 2), outputs=["y"])
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    factors["up"] = changed(factors["up"], scale_d=0.125)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    steps = [numpy_helper.to_array(each) for each in exported.graph.initializer if each.name == "conv_out.scale"]
    assert steps == [0.125]
    assert "conv_out" not in plan_tensors(model, net.bindings()).observed
