"""ONNX models of an unusual form: old files, weights that are computed from constants, inputs of one axis."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_nets import graph_model, node, normal, run

import amct.onnx_model as amct
from amct.errors import ModelError
from amct.export.onnx.graph import OnnxGraph
from amct.onnx_model.reading import read_model


def batches(*shape):
    return [normal(*shape, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("opset", [7, 8])
@pytest.mark.parametrize("listed", [True, False])
def test_a_file_of_opset_7_or_8_is_quantized(tmp_path, opset, listed):
    weights = {"w": normal(8, 3, 3, 3), "b": normal(8)}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 6, 6])]
    if listed:  # as these files do: weights are optional inputs
        inputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in weights.items()
        ]
    graph = helper.make_graph(
        [node("Conv", "x w b", "y", "conv")],
        "old",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 4, 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)
    quantized = amct.quantize(model, batches(1, 3, 6, 6))
    assert quantized.layers == ("conv",)
    quantized.save(tmp_path / "net", ("qdq",))
    data = normal(1, 3, 6, 6, seed=9)
    (expected,), (found,) = run(model, {"x": data}), run(tmp_path / "net_qdq_model.onnx", {"x": data})
    assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.999


def test_a_weight_and_a_bias_that_are_computed_from_constants_are_quantized(tmp_path):
    nodes = [
        node("ReduceL2", "v", "norm", axes=[1, 2, 3], keepdims=1),
        node("Div", "v norm", "unit"),
        node("Mul", "unit g", "w"),
        node("Add", "b0 b1", "b"),
        node("Conv", "x w b", "y", "conv"),
    ]
    weights = {"v": normal(8, 3, 3, 3), "g": normal(8, 1, 1, 1), "b0": normal(8), "b1": normal(8, seed=2)}
    model = graph_model(nodes, weights, ("n", 3, 6, 6))
    quantized = amct.quantize(model, batches(1, 3, 6, 6))
    assert quantized.layers == ("conv",)
    quantized.save(tmp_path / "net", ("qdq",))
    data = normal(1, 3, 6, 6, seed=9)
    (expected,), (found,) = run(model, {"x": data}), run(tmp_path / "net_qdq_model.onnx", {"x": data})
    assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.999


def test_a_constant_that_grows_by_broadcasting_is_not_computed():
    column, row = normal(2**14, 1), normal(1, 2**14)  # 1 GiB together
    nodes = [node("Add", "a b", "w"), node("MatMul", "x w", "y", "product")]
    graph = OnnxGraph(graph_model(nodes, {"a": column, "b": row}, (1, 2**14)))
    assert graph.constant("w") is None
    nodes = [node("Add", "a a", "w"), node("MatMul", "x w", "y", "product")]
    graph = OnnxGraph(graph_model(nodes, {"a": column}, (1, 2**14)))
    np.testing.assert_array_equal(graph.constant("w"), 2 * column)


@pytest.mark.parametrize("placement", ["fast", "exact"])
def test_an_input_of_one_axis_keeps_it(tmp_path, placement):
    model = graph_model([node("MatMul", "x w", "y", "product")], {"w": normal(8, 4)}, (8,))
    quantized = amct.quantize(model, batches(8))
    data = normal(8, seed=9)
    assert quantized({"x": data})["y"].shape == (4,)
    quantized.save(tmp_path / "net", ("qdq", "fake_quant"), placement=placement)
    for name in ("net_qdq_model.onnx", "net_fake_quant_model.onnx"):
        assert run(tmp_path / name, {"x": data})[0].shape == (4,)


def test_an_operator_that_only_newer_opsets_have_is_named_without_the_converter_s_source():
    weights = {name: normal(8, 8) for name in ("wq", "wk", "wv")}
    nodes = [node("MatMul", f"x w{part}", part) for part in "qkv"]
    nodes.append(node("Attention", "q k v", "y", q_num_heads=2, kv_num_heads=2))
    model = graph_model(nodes, weights, (1, 6, 8), opset=23)
    with pytest.raises(
        ModelError, match=r"cannot be converted to 21: No Previous Version of Attention exists; export it"
    ):
        read_model(model)


def test_identities_between_a_layer_and_what_is_folded_into_it_are_removed():
    nodes = [
        node("Conv", "x w", "a", "conv"),
        node("Identity", "a", "a2"),
        node("Mul", "a2 two", "b"),
        node("Identity", "b", "b2"),
        node("Identity", "b2", "b3"),
        node("BatchNormalization", "b3 s t m v", "c", "norm"),
        node("Identity", "c", "y"),
    ]
    weights = {"w": normal(8, 3, 3, 3), "two": np.array([2], np.float32), "v": np.ones(8, np.float32)}
    weights |= {name: normal(8, seed=seed) for seed, name in enumerate("stm")}
    model = graph_model(nodes, weights, ("n", 3, 6, 6), outputs=("y", "b2"))
    read = read_model(model).model
    assert [each.op_type for each in read.graph.node] == ["Conv", "Mul", "Identity", "BatchNormalization", "Identity"]
    alone = graph_model(nodes, weights, ("n", 3, 6, 6))
    quantized = amct.quantize(alone, batches(1, 3, 6, 6))
    assert [each.op_type for each in quantized.prepared.folded.graph.node] == ["Conv", "Identity"]
    assert not [skip for skip in quantized.skipped if skip.layer == "norm"]
    data = {"x": normal(2, 3, 6, 6, seed=9)}
    for first, second in zip(run(model, data), run(read, data), strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_identity_that_a_body_reads_stays():
    body = helper.make_graph([node("Relu", "a", "r")], "then", [], [helper.make_tensor_value_info("r", 1, None)])
    other = helper.make_graph([node("Neg", "a", "s")], "else", [], [helper.make_tensor_value_info("s", 1, None)])
    nodes = [
        node("MatMul", "x w", "m", "product"),
        node("Identity", "m", "a"),
        node("ReduceMean", "a", "mean", keepdims=0),
        node("Greater", "mean zero", "is_positive"),
        node("If", "is_positive", "y", then_branch=body, else_branch=other),
    ]
    model = graph_model(nodes, {"w": normal(6, 4), "zero": np.array(0, np.float32)}, (2, 6))
    read = read_model(model).model
    data = {"x": normal(2, 6, seed=9)}
    np.testing.assert_array_equal(run(model, data)[0], run(read, data)[0])
