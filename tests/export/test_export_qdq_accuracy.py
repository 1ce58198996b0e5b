"""What the fast QDQ file does beyond the record to lose less: balanced inputs, corrected biases, scales per output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from export_nets import NETS, Net, calibrate, changed, channels, residual, run, run_all
from onnx import numpy_helper

from amct.export.onnx.runtimes import count_integer_kernels
from amct.export.qdq.exporter import qdq_model
from amct.export.request import Placement, Target
from amct.numerics.qparams import with_means


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def mean_error(model, exported, feeds):
    """Squared error relative to the squared output; in float, because 8-bit weights overflow on CPUs without VNNI."""
    expected, found = run(model, feeds), run(exported, feeds, optimize=False)
    return max(float(np.square(found[name] - value).sum() / np.square(value).sum()) for name, value in expected.items())


def two_readers():
    """Two linear layers that read one tensor with an outlier channel, and one behind them."""
    net = Net(seed=3)
    spread = np.ones((1, 1, 32), np.float32)
    spread[..., 7] = 80
    x = net.add("Mul", "spread", net.input("x", 2, 9, 32), net.constant("factor", spread))
    parts = []
    for name in ("a", "b"):
        y = net.layer("MatMul", name, x, net.weight(f"{name}.w", 32, 16))
        parts.append(net.add("Add", f"{name}_add", y, net.weight(f"{name}.b", 16)))
    y = net.add("Tanh", "tanh", net.add("Add", "sum", *parts))
    net.layer("MatMul", "last", y, net.weight("last.w", 16, 8), outputs=["y"])
    return net, net.model("y")


def balanced_entry(net, model, tensor, factors):
    values = run_all(model, net.data())[tensor] / factors
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    scale = (high - low) / 255
    mean = run_all(model, net.data())[tensor].mean((0, 1))
    return channels(scale, round(-128 - low / scale), balance=factors.tolist(), mean=mean.tolist())


@pytest.mark.parametrize("target", [Target.PORTABLE, Target.VNNI])
def test_balanced_inputs_are_divided_once_for_all_readers_and_lose_less(target, tmp_path):
    net, model = two_readers()
    factors, tensors = calibrate(net, model)
    divisor = np.ones(32, np.float32)
    divisor[7] = 16
    plain = qdq_model(model, net.bindings(), factors, tensors=tensors, target=target)
    tensors["spread_out"] = balanced_entry(net, model, "spread_out", divisor)
    balanced = qdq_model(model, net.bindings(), factors, tensors=tensors, target=target)
    names = [node.name for node in balanced.model.graph.node]
    assert names.count("a.mul") == 1
    assert "b.mul" not in names
    feeds = net.data()
    assert mean_error(model, balanced.model, feeds) < mean_error(model, plain.model, feeds) / 2
    path = tmp_path / "balanced.onnx"
    onnx.save(balanced.model, path)
    assert count_integer_kernels(path).share == 1


def test_the_record_s_own_integers_are_not_balanced():
    net, model = two_readers()
    factors, tensors = calibrate(net, model)
    tensors["spread_out"] = balanced_entry(net, model, "spread_out", np.full(32, 2, np.float32))
    for options in ({"target": Target.EXACT8}, {"placement": Placement.EXACT}):
        exported = qdq_model(model, net.bindings(), factors, tensors=tensors, **options)
        assert not any(node.name.endswith(".mul") for node in exported.model.graph.node)


def test_layers_that_cannot_be_balanced_keep_the_record_s_factors():
    net, model = two_readers()
    factors, tensors = calibrate(net, model)
    factors["a"] = changed(factors["a"], wts_bits=6)
    tensors["spread_out"] = balanced_entry(net, model, "spread_out", np.full(32, 2, np.float32))
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    names = [node.name for node in exported.model.graph.node]
    assert "b.mul" in names
    assert "a.mul" not in names
    tensors["spread_out"] = replace(tensors["spread_out"], balance=torch.tensor([1.0, 2.0]))
    unfitting = qdq_model(model, net.bindings(), factors, tensors=tensors)
    assert not any(node.name.endswith(".mul") for node in unfitting.model.graph.node)


@pytest.mark.parametrize("name", ["residual", "grouped", "linear"])
def test_biases_take_back_the_mean_of_what_rounding_the_weights_does(name):
    net, model = NETS[name]()
    factors, tensors = calibrate(net, model)
    feeds = net.data()
    values = run_all(model, feeds)
    nodes = {node.name: node for node in model.graph.node}
    for binding in net.bindings():
        tensor = nodes[binding.node].input[0]
        value = values[tensor] if tensor in values else feeds[tensor]
        others = tuple(
            axis
            for axis in range(value.ndim)
            if axis != (1 if nodes[binding.node].op_type == "Conv" else value.ndim - 1)
        )
        tensors[tensor] = channels(1.0, 0, mean=value.mean(others).tolist())
    known = {name: each for name, each in tensors.items() if each.mean is None}
    read = {binding.layer: nodes[binding.node].input[0] for binding in net.bindings()}
    with_mean = with_means(factors, tensors, read)
    corrected = initializers(qdq_model(model, net.bindings(), with_mean, tensors=known).model)
    plain = initializers(qdq_model(model, net.bindings(), factors, tensors=known).model)
    checked = 0
    for binding in net.bindings():
        node = nodes[binding.node]
        if node.op_type != "Conv" or len(node.input) < 3:
            continue
        checked += 1
        weight_name, bias_name = node.input[1], node.input[2]
        weight = initializers(model)[weight_name].astype(np.float64)
        scales = corrected[f"{weight_name}.scale"].reshape(-1, 1, 1, 1)
        lost = (weight - corrected[f"{weight_name}.quantized"] * scales).sum((2, 3))
        mean = np.asarray(tensors[node.input[0]].mean)
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        inputs = np.repeat(mean.reshape(groups, -1), len(weight) // groups, axis=0)
        step = corrected[f"{bias_name}.scale"]
        moved = (corrected[f"{bias_name}.quantized"] - plain[f"{bias_name}.quantized"].astype(np.float64)) * step
        # Both biases are rounded to a step of the accumulator.
        np.testing.assert_allclose(moved, (lost * inputs).sum(1), atol=1.01 * step.max())
    assert checked == sum(node.op_type == "Conv" and len(node.input) == 3 for node in nodes.values())


def test_vnni_gives_linear_layers_a_scale_per_output_where_the_record_has_one():
    net, model = NETS["linear"]()
    names = list(net.layers)
    factors, tensors = calibrate(net, model, per_tensor=names)
    assert all(entry.scale_w.size == 1 for entry in factors.values())
    exported = {
        target: initializers(qdq_model(model, net.bindings(), factors, tensors=tensors, target=target).model)
        for target in (Target.VNNI, Target.EXACT8)
    }
    sizes = {
        target: {value.size for name, value in stored.items() if name.endswith(".w.scale")}
        for target, stored in exported.items()
    }
    assert sizes[Target.EXACT8] == {1}
    assert sizes[Target.VNNI]
    assert 1 not in sizes[Target.VNNI]


def test_layer_inputs_do_not_become_factors_of_the_tensors_between():
    net, model = residual()
    factors, tensors = calibrate(net, model)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors)
    between = next(name for name in exported.tensors if name in tensors and name not in net.inputs)
    by_channel = channels(1e6, 0, mean=(0.0,))
    other = qdq_model(model, net.bindings(), factors, tensors={**tensors, between: by_channel})
    scales = [value for name, value in initializers(other.model).items() if name.endswith(".scale")]
    assert max(float(np.max(value)) for value in scales) < 1e3
