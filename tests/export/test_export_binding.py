"""Bindings and factors: what is refused, and the graph that does not look as bound."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from export_nets import Net, calibrate, changed, linear, quantized, recurrent, residual
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from amct.errors import ExportError, FileError, ParseError, RecordValueError
from amct.export.deploy import ascend_model
from amct.export.onnx.layer_lookup import LayerBinding, bindings_by_name, find_layers
from amct.model.kinds import LayerKind
from amct.numerics.qparams import Observed
from amct.record.conversion import data_qparams, read_tensor_qparams, tensor_qparams_path, tensor_qparams_text

GOOD = {"scale_d": 0.1, "offset_d": 0, "scale_w": np.ones(1)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_d": 0.0}, "scale_d: expected finite numbers above 0, got 0 at index 0"),
        ({"scale_d": float("nan")}, "scale_d: expected finite numbers above 0, got nan"),
        ({"scale_w": np.array([1.0, -2.0])}, "scale_w: expected finite numbers above 0, got -2 at index 1"),
        ({"scale_r": np.array([np.inf])}, "scale_r: .* got inf"),
        ({"balance": np.array([0.0])}, "balance: .* got 0"),
        ({"scale_h": -1.0, "offset_h": 0}, "scale_h: .* got -1"),
        ({"offset_d": 128}, r"offset_d: expected -128\.\.127 for 8 bits, got 128"),
        ({"offset_d": -9, "act_bits": 4}, r"offset_d: expected -8\.\.7 for 4 bits, got -9"),
        ({"scale_h": 1.0, "offset_h": 40000, "act_bits": 16}, r"offset_h: expected -32768\.\.32767 for 16 bits"),
        ({"act_bits": 7}, "act_bits: expected one of 4, 8, 16, got 7"),
        ({"wts_bits": 5}, "wts_bits: expected one of 4, 6, 7, 8, got 5"),
    ],
)
def test_illegal_factors_are_refused(change, words):
    with pytest.raises(RecordValueError, match=words):
        quantized(**(GOOD | change))


def test_factors_are_held_in_float32():
    factors = quantized(scale_d=0.1, offset_d=0, scale_w=[0.1, 0.2])
    assert factors.scale_d == float(np.float32(0.1))
    assert factors.scale_w.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.0}, "scale: expected"),
        ({"scale": 1e40}, "scale: expected finite numbers above 0, got inf"),
        ({"bits": 3}, "bits: expected"),
        ({"offset": 200}, "zero_point: expected"),
    ],
)
def test_illegal_tensor_factors_are_refused(change, words):
    with pytest.raises(RecordValueError, match=words):
        data_qparams(**({"scale": 1.0, "offset": 0, "bits": 8} | change))


def test_bindings_by_name_need_nodes_named_like_layers():
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv1")
    model = helper.make_model(
        helper.make_graph([node, helper.make_node("Relu", ["y"], ["z"], name="act")], "g", [], [])
    )
    assert bindings_by_name(model, ["conv1"]) == [LayerBinding(layer="conv1", kind=LayerKind.CONV, node="conv1")]
    with pytest.raises(ExportError, match=r'layer "act": .* but it is a Relu'):
        bindings_by_name(model, ["act"])
    with pytest.raises(ExportError, match=r'layer "conv2": .* there is no node of this name'):
        bindings_by_name(model, ["conv2"])


# -- the graph does not look as bound --------------------------------------------------------------------------------


def found(net, model, factors):
    return find_layers(model, net.bindings(), factors)


def test_a_binding_to_another_operator_is_refused():
    net, model = residual()
    factors, _ = calibrate(net, model)
    bindings = [LayerBinding(layer="stem", kind=LayerKind.LINEAR, node="node_stem")]
    with pytest.raises(
        ExportError, match=r'layer "stem" \(linear, node "node_stem" of Conv\): expected Gemm or MatMul'
    ):
        find_layers(model, bindings, {"stem": factors["stem"]})


def test_nodes_are_bound_once():
    net, model = residual()
    factors, _ = calibrate(net, model)
    with pytest.raises(ExportError, match="bound more than once: node_stem"):
        find_layers(model, [*net.bindings(), net.bindings()[0]], factors)


def test_factors_of_unbound_layers_are_refused():
    net, model = residual()
    factors, _ = calibrate(net, model)
    factors["stm"] = factors["stem"]
    with pytest.raises(ExportError, match=r'factors for layer "stm", which is not bound .* Did you mean "stem"'):
        found(net, model, factors)


@pytest.mark.parametrize(
    ("layer", "change", "words"),
    [
        ("stem", {"scale_w": np.ones(3)}, "expected 1 or 8 scale_w, got 3"),
        ("stem", {"balance": np.ones(8)}, "expected 3 tensor_balance_factor, got 8"),
        ("fc", {"scale_w": np.ones(8)}, "expected 1 or 5 scale_w, got 8"),
    ],
)
def test_factors_of_the_wrong_length_are_refused(layer, change, words):
    net, model = residual()
    factors, _ = calibrate(net, model)
    factors[layer] = changed(factors[layer], **change)
    with pytest.raises(ExportError, match=f'layer "{layer}" .*{words}'):
        found(net, model, factors)


def test_pooling_has_one_scale_and_no_balance():
    net = Net()
    net.layer("AveragePool", "pool", net.input("x", 1, 4, 4, 4), kernel_shape=[2, 2], outputs=["y"])
    model = net.model("y")
    with pytest.raises(ExportError, match="average pooling has no weight to balance"):
        found(net, model, {"pool": quantized(**GOOD, balance=np.ones(4))})
    with pytest.raises(ExportError, match="expected 1 scale_w, got 4"):
        found(net, model, {"pool": quantized(**(GOOD | {"scale_w": np.ones(4)}))})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_h": None}, "expected scale_h, offset_h and scale_r among its factors"),
        ({"scale_w": np.ones(5)}, "expected 1 or 4 or 24 scale_w, got 5"),
        ({"scale_r": np.ones(5)}, "expected 1 or 4 or 24 scale_r, got 5"),
    ],
)
def test_recurrent_layers_need_all_their_factors(change, words):
    net, model = recurrent("LSTM")
    factors, _ = calibrate(net, model)
    factors["rnn"] = changed(factors["rnn"], **change)
    with pytest.raises(ExportError, match=words):
        found(net, model, factors)


def test_two_directions_are_refused():
    net, model = recurrent("GRU")
    factors, _ = calibrate(net, model)
    node = next(node for node in model.graph.node if node.op_type == "GRU")
    node.attribute.append(helper.make_attribute("direction", "reverse"))
    with pytest.raises(ExportError, match="expected one forward direction"):
        found(net, model, factors)


def edited(model, name, value):
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(value, name))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((12, 10), np.int8), "expected a floating-point weight, got int8; start from the float model"),
        (np.zeros((12, 10, 1), np.float32), r"expected a weight of 2 dimensions, got shape \[12, 10, 1\]"),
    ],
)
def test_weights_of_another_form_are_refused(value, words):
    net, model = linear()
    factors, _ = calibrate(net, model)
    edited(model, "fc1.w", value)
    with pytest.raises(ExportError, match=words):
        found(net, model, factors)


def test_a_convolution_needs_a_kernel():
    net, model = residual()
    factors, _ = calibrate(net, model)
    edited(model, "stem.w", np.zeros((8, 3), np.float32))
    with pytest.raises(ExportError, match=r"expected a weight of at least 3 dimensions, got shape \[8, 3\]"):
        found(net, model, factors)


def test_a_gemm_with_other_settings_is_refused():
    net, model = linear()
    factors, _ = calibrate(net, model)
    node = next(node for node in model.graph.node if node.name == "node_fc1")
    node.attribute.append(helper.make_attribute("alpha", 0.5))
    with pytest.raises(ExportError, match=r"expected transA=0, alpha=1, beta=1, got .*0.5"):
        found(net, model, factors)


def test_a_bias_of_another_length_is_refused():
    net, model = linear()
    factors, _ = calibrate(net, model)
    edited(model, "fc1.b", np.zeros(7, np.float32))
    with pytest.raises(ExportError, match=r"expected a bias of 12 values, got shape \[7\]"):
        found(net, model, factors)


def test_a_computed_weight_is_refused_and_so_is_a_missing_one():
    net, model = linear()
    factors, _ = calibrate(net, model)
    node = next(node for node in model.graph.node if node.name == "node_bare")
    node.input[1] = "fc2_out"
    with pytest.raises(ExportError, match='its weight "fc2_out" is computed; expected a constant'):
        found(net, model, factors)
    del node.input[1]
    with pytest.raises(ExportError, match="it has no weight input"):
        found(net, model, factors)


def test_amct_s_mark_in_the_modified_model_is_removed():
    net, model = residual()
    factors, _ = calibrate(net, model)
    for node in model.graph.node:
        node.attribute.append(helper.make_attribute("op_data_type", "float"))
    graph, _, _ = found(net, model, factors)
    assert not any(attribute.name == "op_data_type" for node in graph.nodes for attribute in node.attribute)


def test_a_shared_weight_is_copied_for_each_layer():
    """Two layers may quantize one weight differently."""
    net = Net()
    x, w = net.input("x", 1, 4, 6, 6), net.weight("w", 4, 4, 1, 1)
    net.layer("Conv", "b", net.layer("Conv", "a", x, w), w, outputs=["y"])
    model = net.model("y")
    factors, _ = calibrate(net, model)
    factors["b"] = changed(factors["b"], scale_w=factors["b"].scale_w * 2)
    stored = {
        t.name: numpy_helper.to_array(t) for t in ascend_model(model, net.bindings(), factors).model.graph.initializer
    }
    assert np.abs(stored["a.weight"]).max() == 127
    assert np.abs(stored["w"]).max() == 64  # 63.5, rounded to even


# -- <record>.qdq.json -------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.floats(2**-30, 2**30, width=32), st.integers(-128, 127)),
        max_size=4,
    )
)
def test_tensor_factors_are_read_back_as_written(entries):
    factors = {name: Observed.of(scale, zero) for name, (scale, zero) in entries.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = tensor_qparams_path(Path(folder) / "record.txt")
        assert path.name == "record.txt.qdq.json"
        path.write_text(tensor_qparams_text(factors))
        assert read_tensor_qparams(path) == factors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "the whole file: Invalid JSON"),
        ('{"version": 2, "tensors": {}}', "version: "),
        ('{"version": 1, "tensors": {"a": {"scale": "x", "zero_point": 0}}}', "tensors.a.scale: "),
        ('{"version": 1, "tensors": {"a": {"scale": 0.0, "zero_point": 0}}}', 'tensor "a": scale: expected'),
        ('{"version": 1, "tensors": {"a": {"scale": 1.0, "zero_point": 0, "more": 1}}}', "tensors.a.more: "),
        (
            '{"version": 1, "tensors": {"a": {"scale": 1.0, "zero_point": 0, "balance": [1, 0]}}}',
            "balance: .* at index 1",
        ),
        ('{"version": 1, "tensors": {"a": {"scale": 1.0, "zero_point": 0, "mean": [NaN]}}}', "mean: "),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path, text, words):
    path = tmp_path / "record.txt.qdq.json"
    path.write_text(text)
    with pytest.raises(ParseError, match=words):
        read_tensor_qparams(path)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        read_tensor_qparams(tmp_path / "record.txt.qdq.json")
