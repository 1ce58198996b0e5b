"""The QDQ file: values against NumPy, integer kernels as onnxruntime itself reports them, reasons for the rest."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import NETS, Net, calibrate, changed, linear, quantized, residual, run, transposed
from numpy_nets import FakeQuantReference
from onnx import TensorProto, numpy_helper
from test_export_fake_quant import balanced

from amct.errors import ArgumentError, ExportError
from amct.export.onnx.runtimes import KernelCount, count_integer_kernels
from amct.export.qdq.exporter import plan_tensors, qdq_model
from amct.export.request import Placement, Target

EXACT8 = {"placement": Placement.EXACT, "target": Target.EXACT8}
CONVOLUTIONAL = ("residual", "grouped", "linear", "pooled", "conv1d3d")


def kernels(model, folder) -> KernelCount:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return count_integer_kernels(path)


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def error(model, exported, feeds):
    """Largest difference of the outputs, relative to the largest output."""
    expected, result = run(model, feeds), run(exported, feeds)
    return max(np.abs(result[name] - value).max() / np.abs(value).max() for name, value in expected.items())


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("per_tensor", [False, True], ids=["per_channel", "per_tensor"])
def test_exact_placement_agrees_with_numpy_up_to_rounding_at_halves(make, per_tensor):
    net, model = make()
    factors, _ = calibrate(net, model, per_tensor=net.layers if per_tensor else ())
    exported = qdq_model(model, net.bindings(), factors, **EXACT8)
    onnx.checker.check_model(exported.model, full_check=True)
    feeds = net.data(seed=7)
    reference = FakeQuantReference(model, factors, {f"node_{name}": name for name in net.layers})
    values, bounds = reference.run(feeds)
    for name, result in run(exported.model, feeds).items():
        assert np.all(np.abs(result - values[name]) <= bounds[name])


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("placement", Placement)
def test_every_file_runs_and_stays_near_float(make, placement, target):
    """Without onnxruntime's optimizations, whose 16-bit sums spoil target "vnni" on the wrong CPU."""
    net, model = make()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, placement=placement, target=target)
    onnx.checker.check_model(exported.model, full_check=True)
    feeds = net.data()
    for name, expected in run(model, feeds).items():
        result = run(exported.model, feeds, optimize=False)[name]
        # A handful of quantizations of 1/255 (weights 1/127) of the range each; a wrong axis or zero point gives ~1.
        assert np.abs(result - expected).max() < 0.06 * np.abs(expected).max()


def kernel_weights(model):
    """The integer weights of convolutions and matrix products as ``[Cout, Cin/groups, ...]``, with their groups."""
    stored = initializers(model)
    dequantized = {node.output[0]: stored.get(node.input[0]) for node in model.graph.node}
    found = []
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            settings = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            weight = dequantized[node.input[1]]
            columns = node.op_type == "MatMul" or (node.op_type == "Gemm" and not settings.get("transB", 0))
            found.append((weight.T if columns else weight, settings.get("group", 1)))
    return found


@pytest.mark.parametrize("make", [NETS[name] for name in CONVOLUTIONAL], ids=CONVOLUTIONAL)
def test_portable_weights_cannot_overflow_sixteen_bits(make):
    """Two products of a uint8 and a weight fit 16 bits, so integer kernels and plain arithmetic agree on any CPU."""
    net, model = make()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    weights = kernel_weights(exported)
    assert len(weights) == sum(kind != "AveragePool" for kind in net.layers.values())
    for weight, groups in weights:
        rows = np.moveaxis(weight.astype(int), 1, -1).reshape(len(weight), -1)  # kernel positions, then inputs
        if weight.shape[1] == 1 and len(weight) == groups:
            continue  # depthwise: nothing is added in 16 bits
        pairs = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2))).reshape(len(rows), -1, 2)
        same_sign = pairs.prod(-1) > 0
        assert 255 * (np.abs(pairs).sum(-1) * same_sign).max() < 2**15
        assert np.abs(pairs).max() <= 127
    feeds = net.data(seed=9)
    plain, fused = run(exported, feeds, optimize=False), run(exported, feeds)
    for name, value in plain.items():
        # Where a float32 result lies on a half, the integer kernel may take the other step: 1/255 of the range.
        assert np.abs(fused[name] - value).max() <= 1.01 * np.ptp(value) / 255 + 1e-6


def test_portable_rounds_the_float_weights_not_the_eight_bit_ones():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    stored, original = initializers(exported.model), initializers(model)
    scale = stored["first.w.scale"].reshape(-1, 1, 1, 1)
    restored = stored["first.w.quantized"] * scale
    error = (restored - original["first.w"]) / scale
    # Less than a step for each weight, and for most kernels, as for all whole outputs, together no more than for one
    # weight that is rounded to nearest. The 8-bit grid rounded again would be far off.
    # Weights of two neighbouring inputs that are as large as a pair may be together are reduced further, or stay.
    sums = stored["first.w.quantized"].astype(int).reshape(8, 4, 2, 9).sum(2)
    free = np.repeat((np.abs(sums) < 127).all(-1), 2, axis=1)
    assert free.mean() > 0.7
    assert np.abs(error)[free].max() < 1
    assert (np.abs(error.sum((2, 3))) <= 0.5 + 1e-3).mean() > 0.8  # rounded to nearest: 0.43
    assert np.abs(error.sum((1, 2, 3))).max() <= 0.5 + 1e-3
    assert {report.layer: report.weight_bits for report in exported.layers}["first"] == 8


def test_types_of_the_targets():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    stored = {
        target: initializers(qdq_model(model, net.bindings(), factors, tensors=tensors, target=target).model)
        for target in Target
    }
    vnni, exact8 = stored[Target.VNNI], stored[Target.EXACT8]
    assert vnni["first.w.quantized"].dtype == np.int8
    assert not vnni["first.w.zero_point"].any()
    assert exact8["first.w.quantized"].dtype == np.uint8
    assert np.all(exact8["first.w.zero_point"] == 128)
    np.testing.assert_array_equal(vnni["first.w.quantized"].astype(int) + 128, exact8["first.w.quantized"])
    assert stored[Target.PORTABLE]["first.b.quantized"].dtype == np.int32
    assert all(values["x.zero_point"] == factors["stem"].input.zero_point + 128 for values in stored.values())


def test_portable_keeps_weights_that_have_few_bits_already():
    net, model = residual()
    factors, tensors = calibrate(net, model, wts_bits=6)
    narrow = initializers(qdq_model(model, net.bindings(), factors, tensors=tensors).model)
    vnni = initializers(qdq_model(model, net.bindings(), factors, tensors=tensors, target=Target.VNNI).model)
    np.testing.assert_array_equal(narrow["first.w.quantized"], vnni["first.w.quantized"])


# -- integer kernels ---------------------------------------------------------------------------------------------------


def many_operators(activation="Clip"):
    """What stands between layers in real nets: ReLU6, MaxPool, Sigmoid·x, Slice, Resize, Pad, Concat, pooling."""
    net = Net(seed=11)
    x = net.input("x", 2, 3, 16, 16)
    pads = {"pads": [1, 1, 1, 1]}
    y = net.layer("Conv", "stem", x, net.weight("stem.w", 8, 3, 3, 3), net.weight("stem.b", 8), **pads)
    six = [net.constant("zero", np.float32(0)), net.constant("six", np.float32(6))]
    y = net.add("Clip", "relu6", y, *six) if activation == "Clip" else net.add("Relu", "relu6", y)
    y = net.add("MaxPool", "pool", y, kernel_shape=[2, 2], strides=[2, 2])
    left = net.layer("Conv", "left", y, net.weight("left.w", 8, 8, 3, 3), net.weight("left.b", 8), **pads)
    gate = net.add("Sigmoid", "gate", left)
    left = net.add("Mul", "silu", left, gate)
    ends = [net.constant(name, np.array([value])) for name, value in (("s", 0), ("e", 99), ("a", 2), ("t", 2))]
    right = net.add("Slice", "slice", y, *ends)
    right = net.add("Resize", "resize", right, "", net.constant("scales", np.array([1, 1, 2, 1], np.float32)))
    right = net.add("Pad", "pad", right, net.constant("more", np.array([0, 2, 0, 0, 0, 2, 0, 0])))
    y = net.add("Concat", "concat", left, right, axis=1)
    y = net.layer("Conv", "mix", y, net.weight("mix.w", 8, 20, 1, 1), net.weight("mix.b", 8))
    y = net.add("Mul", "scaled", y, net.constant("factor", np.float32(0.5)))
    y = net.add("Flatten", "flat", net.add("GlobalAveragePool", "gap", y))
    net.layer("Gemm", "fc", y, net.weight("fc.w", 5, 8), net.weight("fc.b", 5), transB=1, outputs=["y"])
    return net, net.model("y")


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("activation", ["Clip", "Relu"])
def test_all_that_stands_between_layers_is_integer_too(tmp_path, activation, symmetric):
    net, model = many_operators(activation)
    factors, tensors = calibrate(net, model, symmetric=symmetric)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert exported.skipped == ()
    count = kernels(exported.model, tmp_path)
    assert count.share == 1
    assert count.total == 4
    # One quantizer at the input, and Gemm's float result: nothing goes to float and back in between.
    assert count.operators["QuantizeLinear"] == 1
    assert count.operators["DequantizeLinear"] == 0
    assert not {"Relu", "Clip", "Add", "Concat", "Sigmoid", "Mul"} & set(count.operators)
    assert error(model, exported.model, net.data()) < 0.06


def test_a_bias_follows_the_step_that_its_input_has_in_the_file():
    """Behind a ReLU a symmetric input gets a finer step; onnxruntime takes the bias in steps of input times weight."""
    net, model = many_operators("Clip")
    factors, tensors = calibrate(net, model, symmetric=True)
    stored = initializers(qdq_model(model, net.bindings(), factors, tensors=tensors).model)
    step = stored["pool_out.scale"] * stored["left.w.scale"]
    upper_limit = min(6, 127 * factors["left"].scale_d)
    assert stored["pool_out.scale"] == pytest.approx(upper_limit / 255, rel=1e-6)
    np.testing.assert_array_equal(stored["left.b.scale"], step)
    original = initializers(model)["left.b"]
    assert np.all(np.abs(stored["left.b.quantized"] * step - original) <= 0.5001 * step)


@pytest.mark.parametrize("make", [NETS[name] for name in CONVOLUTIONAL], ids=CONVOLUTIONAL)
def test_every_layer_with_an_integer_kernel_gets_it(tmp_path, make):
    net, model = make()
    factors, tensors = calibrate(net, model)
    count = kernels(qdq_model(model, net.bindings(), factors, tensors=tensors).model, tmp_path)
    assert count.total == sum(kind != "AveragePool" for kind in net.layers.values())
    assert count.share == 1


def test_without_outputs_quantized_convolutions_stay_float(tmp_path):
    """Why placement "fast" exists; also shows that the count can fall below 1."""
    net, model = residual()
    factors, _ = calibrate(net, model)
    count = kernels(qdq_model(model, net.bindings(), factors, placement=Placement.EXACT).model, tmp_path)
    assert count.share < 0.95


def attention():
    net = Net(seed=12)
    x = net.input("x", 2, 6, 16)
    heads = net.constant("heads", np.array([2, 6, 4, 4]))
    parts = {}
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        y = net.layer("MatMul", name, x, net.weight(f"{name}.w", 16, 16))
        y = net.add("Add", f"{name}_add", y, net.weight(f"{name}.b", 16))
        parts[name] = net.add("Transpose", f"{name}_t", net.add("Reshape", f"{name}_r", y, heads), perm=order)
    scores = net.add("Softmax", "soft", net.add("MatMul", "scores", parts["q"], parts["k"]))
    y = net.add("Transpose", "back", net.add("MatMul", "context", scores, parts["v"]), perm=[0, 2, 1, 3])
    y = net.add("Reshape", "joined", y, net.constant("joined_shape", np.array([2, 6, 16])))
    y = net.layer("MatMul", "o", y, net.weight("o.w", 16, 16))
    y = net.add("Add", "o_add", y, net.weight("o.b", 16))
    net.add("Add", "residual", y, x, outputs=["y"])
    return net, net.model("y")


def test_products_inside_attention_are_integer_and_sums_stay_float(tmp_path):
    net, model = attention()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    count = kernels(exported.model, tmp_path)
    assert count.total == 6
    assert count.share == 1
    assert count.operators["QLinearAdd"] == 0  # the residual sum is not worth two more quantizers
    assert error(model, exported.model, net.data()) < 0.06


# -- placement ---------------------------------------------------------------------------------------------------------


def test_the_tensors_to_observe_are_all_that_fast_needs():
    net, model = many_operators()
    factors, tensors = calibrate(net, model)
    names = plan_tensors(model, net.bindings()).observed
    assert set(names) == {"left_out", "gate_out", "silu_out", "mix_out", "scaled_out"}
    exported = qdq_model(model, net.bindings(), factors, tensors={name: tensors[name] for name in names})
    complete = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert exported.skipped == ()
    assert exported.model == complete.model


def test_layers_of_another_kind_need_more_tensors():
    net, model = residual()
    assert set(plan_tensors(model, net.bindings()).observed) == {"second_out", "join_relu_out"}
    # A balanced input is folded into the layer before; the stem's result is also read by the sum, so it is observed.
    assert "stem_relu_out" in plan_tensors(model, net.bindings(), balanced={"first", "second"}).observed
    assert "first_relu_out" not in plan_tensors(model, net.bindings(), balanced={"first", "second"}).observed
    # What a layer of 16 bits reads must not pass through 8 bits.
    assert not {"first_out", "first_relu_out"} & set(
        plan_tensors(model, net.bindings(), other_bits={"second"}).observed
    )


def test_tensors_without_factors_are_returned_with_the_consequence(tmp_path):
    net, model = residual()
    factors, tensors = calibrate(net, model)
    del tensors["second_out"]
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert [skip.layer for skip in exported.skipped] == ["second_out"]
    assert 'onnxruntime computes convolution "second" in float' in exported.skipped[0].reason
    count = kernels(exported.model, tmp_path)
    assert (count.integer, count.total) == (3, 4)
    assert error(model, exported.model, net.data()) < 0.06


def test_an_elementwise_operator_without_factors_stays_float():
    net, model = many_operators()
    factors, tensors = calibrate(net, model)
    del tensors["scaled_out"]
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert ("scaled_out", "no factors were observed for this tensor; Mul stays float") in {
        (skip.layer, skip.reason) for skip in exported.skipped
    }
    assert error(model, exported.model, net.data()) < 0.06


def test_without_observed_tensors_placement_is_exact_with_a_note():
    net, model = residual()
    factors, _ = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors)
    exact = qdq_model(model, net.bindings(), factors, placement=Placement.EXACT)
    assert exported.model == exact.model
    assert exported.notes == (
        'no factors of the tensors between layers were given: placement "exact" instead of "fast"',
    )


def test_one_plan_before_calibration_becomes_files_that_differ_by_what_was_observed():
    """Why the planner asks again at save: where quantizers stand depends on values that only calibration gives."""
    net = Net()
    x = net.input("x", 1, 3, 6, 6)
    y = net.layer("Conv", "first", x, net.weight("first.w", 4, 3, 3, 3))
    a = net.layer("Conv", "a", y, net.weight("a.w", 4, 4, 1, 1))
    b = net.layer("Conv", "b", y, net.weight("b.w", 4, 4, 1, 1))
    net.add("Add", "sum", a, b, outputs=["y"])
    model = net.model("y")
    qparams, tensors = calibrate(net, model)
    observed = {name: tensors[name] for name in plan_tensors(model, net.bindings()).observed}

    def quantizers_behind_first(ratio):
        qparams["b"] = changed(
            qparams["b"], scale_d=qparams["a"].scale_d * ratio, offset_d=qparams["a"].input.zero_point
        )
        exported = qdq_model(model, net.bindings(), qparams, tensors=observed).model
        return [
            node.name for node in exported.graph.node if node.op_type == "QuantizeLinear" and "first_out" in node.name
        ]

    assert len(quantizers_behind_first(1.0)) == 1  # both layers read the same integers
    assert len(quantizers_behind_first(1.5)) == 2


def test_layers_that_disagree_about_a_tensor_each_get_their_own_quantizer(tmp_path):
    net = Net()
    x = net.input("x", 1, 3, 6, 6)
    y = net.layer("Conv", "first", x, net.weight("first.w", 4, 3, 3, 3))
    a = net.layer("Conv", "a", y, net.weight("a.w", 4, 4, 1, 1))
    b = net.layer("Conv", "b", y, net.weight("b.w", 4, 4, 1, 1))
    net.add("Add", "sum", a, b, outputs=["y"])
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    factors["b"] = changed(factors["b"], scale_d=factors["b"].scale_d * 1.1)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    steps = {
        node.name: initializers(exported.model)[node.input[1]].item()
        for node in exported.model.graph.node
        if node.op_type == "QuantizeLinear" and node.name.startswith("first_out")
    }
    assert sorted(steps.values()) == pytest.approx([factors["a"].scale_d, factors["b"].scale_d], rel=1e-6)
    assert kernels(exported.model, tmp_path).share == 1
    assert error(model, exported.model, net.data()) < 0.06


def test_an_output_of_the_graph_keeps_its_name_and_other_users_read_the_same_values():
    net = Net()
    x = net.input("x", 1, 3, 6, 6)
    y = net.layer("Conv", "first", x, net.weight("first.w", 4, 3, 3, 3), outputs=["seen"])
    net.layer("Conv", "second", y, net.weight("second.w", 4, 4, 1, 1), outputs=["y"])
    model = net.model("seen", "y")
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert [value.name for value in exported.graph.output] == ["seen", "y"]
    assert error(model, exported, net.data()) < 0.06


def test_a_tensor_used_inside_a_branch_keeps_its_name():
    net = Net()
    x = net.input("x", 1, 3, 6, 6)
    y = net.layer("Conv", "conv", x, net.weight("w", 4, 3, 3, 3))
    branches = {}
    for name, op_type in (("then_branch", "Relu"), ("else_branch", "Neg")):
        output = onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        node = onnx.helper.make_node(op_type, [y], [name])
        branches[name] = onnx.helper.make_graph([node], name, [], [output])
    net.add("If", "choice", net.constant("always", np.array(True)), outputs=["y"], **branches)
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert error(model, exported, net.data()) < 0.06


# -- other widths and forms --------------------------------------------------------------------------------------------


def test_sixteen_bit_activations_need_opset_21():
    net, model = residual(opset=21)
    factors, tensors = calibrate(net, model, act_bits=16)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target=Target.VNNI)
    assert initializers(exported.model)["x.zero_point"].dtype == np.uint16
    onnx.checker.check_model(exported.model, full_check=True)
    feeds = net.data(seed=7)
    reference = FakeQuantReference(model, factors, {f"node_{name}": name for name in net.layers})
    values, bounds = reference.run(feeds)
    assert np.all(np.abs(run(exported.model, feeds)["y"] - values["y"]) <= bounds["y"])


def test_sixteen_bit_activations_stay_float_in_older_opsets_and_it_is_said():
    net, model = residual()
    factors, tensors = calibrate(net, model, act_bits=16)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert [skip.layer for skip in exported.skipped if "16-bit activations need opset 21" in skip.reason] == [
        *net.layers
    ]
    assert not any(node.op_type == "QuantizeLinear" for node in exported.model.graph.node)
    assert initializers(exported.model)["first.w.quantized"].dtype == np.int8
    assert error(model, exported.model, net.data()) < 0.03


def test_a_tensor_that_a_sixteen_bit_layer_reads_is_not_made_eight_bits():
    net, model = residual(opset=21)
    factors, tensors = calibrate(net, model)
    wide, _ = calibrate(net, model, act_bits=16)
    factors["second"] = wide["second"]
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert [(skip.layer, skip.reason.split(";")[0]) for skip in exported.skipped] == [
        ("first_relu_out", "it feeds a layer of another bit width")
    ]
    assert error(model, exported.model, net.data()) < 0.06


def test_four_bit_activations_are_clipped_to_their_range():
    net, model = residual()
    factors, tensors = calibrate(net, model, act_bits=4)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target=Target.EXACT8)
    feeds = {"x": net.data()["x"] * 3}
    reference = FakeQuantReference(model, factors, {f"node_{name}": name for name in net.layers})
    values, bounds = reference.run(feeds)
    assert np.all(np.abs(run(exported.model, feeds)["y"] - values["y"]) <= bounds["y"])


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("make", [residual, NETS["grouped"], transposed], ids=["residual", "grouped", "transposed"])
def test_balanced_layers_compute_the_float_net(make, placement):
    net, model = make()
    factors, tensors = balanced(net, model, list(net.layers))
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, placement=placement, target=Target.EXACT8)
    assert error(model, exported.model, net.data()) < 0.06


def test_balance_folds_into_the_layer_before(tmp_path):
    """Same integers and no Mul: dividing the weight scales of the first layer divides its output."""
    net, model = residual()
    factors, tensors = balanced(net, model, ["second"])
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target=Target.VNNI).model
    assert not any(node.name == "second.mul" for node in exported.graph.node)
    plain = qdq_model(
        model, net.bindings(), factors, tensors=tensors, placement=Placement.EXACT, target=Target.VNNI
    ).model
    assert any(node.name == "second.mul" for node in plain.graph.node)
    stored, unfolded = initializers(exported), initializers(plain)
    np.testing.assert_array_equal(stored["first.w.quantized"], unfolded["first.w.quantized"])
    np.testing.assert_allclose(
        stored["first.w.scale"] * factors["second"].balance.numpy(), unfolded["first.w.scale"], rtol=2**-22
    )
    assert kernels(exported, tmp_path).share == 1


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "MatMul", "LSTM"])
def test_half_precision_is_cast_around_the_quantizers(op_type):
    half = {"dtype": np.float16}
    net = Net()
    factors = quantized(
        scale_d=0.03, offset_d=3, scale_w=np.full(1, 0.01), scale_h=0.02, offset_h=0, scale_r=np.full(1, 0.01)
    )
    if op_type == "LSTM":
        x, h, c = (net.input(name, *shape, dtype=TensorProto.FLOAT16)
                   for name, shape in (("x", (3, 2, 5)), ("h", (1, 2, 4)), ("c", (1, 2, 4))))  # fmt: skip
        weights = [net.weight("w", 1, 16, 5, **half), net.weight("r", 1, 16, 4, **half), net.weight("b", 1, 32, **half)]
        net.layer("LSTM", "l", x, *weights, "", h, c, hidden_size=4, outputs=["y"])
    elif op_type == "MatMul":
        x = net.input("x", 2, 3, 6, dtype=TensorProto.FLOAT16)
        product = net.layer("MatMul", "l", x, net.weight("w", 6, 5, **half))
        net.add("Add", "bias", product, net.weight("b", 5, **half), outputs=["y"])
    else:
        x = net.input("x", 2, 4, 6, 6, dtype=TensorProto.FLOAT16)
        net.layer(op_type, "l", x, net.weight("w", 4, 4, 3, 3, **half), net.weight("b", 4, **half), outputs=["y"])
    model = net.model("y", dtype=TensorProto.FLOAT16)
    exported = qdq_model(model, net.bindings(), {"l": factors}, tensors={})
    onnx.checker.check_model(exported.model, full_check=True)
    assert exported.notes == ('the model is not float32 throughout: placement "exact" instead of "fast"',)
    if op_type != "LSTM":  # onnxruntime has no half LSTM on the CPU
        assert run(exported.model, net.data())["y"].dtype == np.float16


def test_a_weight_behind_a_transpose_is_found():
    """Exporters leave the Transpose of a large Linear weight in the graph."""
    net = Net()
    x = net.input("x", 2, 5, 8)
    w = net.add("Transpose", "turn", net.weight("w", 6, 8), perm=[1, 0])
    net.layer("MatMul", "fc", x, w, outputs=["y"])
    model = net.model("y")
    factors = {"fc": quantized(scale_d=0.03, offset_d=0, scale_w=np.full(6, 0.01))}
    exported = qdq_model(model, net.bindings(), factors, **EXACT8).model
    assert not any(node.op_type == "Transpose" for node in exported.graph.node)
    assert error(model, exported, net.data()) < 0.06


def test_a_bias_beyond_int32_stays_float_with_a_note():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "fc.b")
    bias.CopyFrom(numpy_helper.from_array(np.full(5, 1e7, np.float32), "fc.b"))
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target=Target.VNNI)
    assert any('layer "fc": the bias does not fit int32' in note for note in exported.notes)
    assert error(model, exported.model, net.data()) < 0.06


def test_an_old_opset_is_refused():
    net, model = linear()
    model.opset_import[0].version = 12
    factors, tensors = calibrate(*linear())
    with pytest.raises(ExportError, match=r"QDQ needs opset 13 .* the model has 12"):
        qdq_model(model, net.bindings(), factors, tensors=tensors)


def test_the_model_given_is_not_changed():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    before = model.SerializeToString()
    qdq_model(model, net.bindings(), factors, tensors=tensors)
    plan_tensors(model, net.bindings())
    assert model.SerializeToString() == before


def test_a_clip_of_other_limits_is_not_absorbed(tmp_path):
    net = Net()
    x = net.input("x", 1, 3, 6, 6)
    y = net.layer("Conv", "conv", x, net.weight("w", 4, 3, 3, 3))
    y = net.add("Clip", "clip", y, net.constant("low", np.float32(-0.2)), net.constant("high", np.float32(0.3)))
    net.layer("Conv", "next", y, net.weight("next.w", 4, 4, 1, 1), outputs=["y"])
    model = net.model("y")
    factors, tensors = calibrate(net, model)
    factors["next"] = changed(factors["next"], scale_d=0.01)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    assert kernels(exported, tmp_path).share == 1
    assert error(model, exported, net.data()) < 0.06


def test_parts_of_a_split_stay_integer_and_places_of_a_maximum_are_left_alone(tmp_path):
    net = Net(seed=13)
    x = net.input("x", 1, 3, 8, 8)
    y = net.add("Relu", "relu", net.layer("Conv", "stem", x, net.weight("stem.w", 8, 3, 3, 3)))
    net.add("MaxPool", "pool", y, kernel_shape=[2, 2], strides=[2, 2], outputs=["largest", "places"])
    net.add("Split", "split", "largest", net.constant("sizes", np.array([4, 4])), axis=1, outputs=["left", "right"])
    y = net.add("Concat", "swap", "right", "left", axis=1)
    net.layer("Conv", "next", y, net.weight("next.w", 4, 8, 1, 1), outputs=["y"])
    net.add("Cast", "seen", "places", to=TensorProto.FLOAT, outputs=["where"])
    model = net.model("y", "where")
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors).model
    onnx.checker.check_model(exported, full_check=True)
    count = kernels(exported, tmp_path)
    assert count.share == 1
    assert count.operators["QLinearConcat"] == 1
    feeds = net.data()
    assert (
        np.abs(run(exported, feeds)["y"] - run(model, feeds)["y"]).max() < 0.06 * np.abs(run(model, feeds)["y"]).max()
    )


def test_factors_may_come_as_plain_text_choices():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    chosen = qdq_model(model, net.bindings(), factors, tensors=tensors, placement="exact", target="vnni")
    assert (
        chosen.model
        == qdq_model(
            model, net.bindings(), factors, tensors=tensors, placement=Placement.EXACT, target=Target.VNNI
        ).model
    )
    for choice in ({"placement": "fastest"}, {"target": "arm"}):
        with pytest.raises(ArgumentError, match=r"(placement|target): expected one of .*, got '(fastest|arm)'"):
            qdq_model(model, net.bindings(), factors, tensors=tensors, **choice)


def test_each_quantizer_is_told_under_the_layer_that_needs_it_first():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    inserted = {report.layer: report.inserted for report in exported.layers}
    assert inserted["stem"][:4] == (
        "x.quantize",
        "x.dequantize",
        "stem_relu_out.quantize",
        "stem_relu_out.dequantize",
    )
    assert "stem.w.dequantize" in inserted["stem"]
    assert "stem_relu_out.quantize" not in inserted["first"]
    assert "second_out.quantize" in inserted["second"]
    told = [name for names in inserted.values() for name in names]
    assert len(told) == len(set(told))
    assert set(told) <= {node.name for node in exported.model.graph.node}
    assert set(exported.tensors) == {"x", "gap_out", "flat_out", "join_relu_out", "second_out"} | {
        "stem_relu_out",
        "first_relu_out",
    }
