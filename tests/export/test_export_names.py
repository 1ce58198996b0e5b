"""No exporter ever reuses a name: a constant of the model may be called like anything that an export adds."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import amct.onnx_model

DATA = np.random.default_rng(2).normal(size=(2, 3, 6, 6)).astype(np.float32)
FACTOR = np.random.default_rng(3).normal(1.0, 0.3, (4, 4, 4)).astype(np.float32)  # by place: it is not folded
FORMATS = ("qdq", "fake_quant", "deploy")


def network(factor_name="factor"):
    """Conv → Mul by a constant → Relu → Conv; the constant has the given name."""
    random = np.random.default_rng(4)
    weights = {
        "w1": random.normal(0, 0.4, (4, 3, 3, 3)).astype(np.float32),
        "b1": random.normal(0, 0.1, 4).astype(np.float32),
        "w2": random.normal(0, 0.4, (5, 4, 1, 1)).astype(np.float32),
        "b2": random.normal(0, 0.1, 5).astype(np.float32),
        factor_name: FACTOR,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["first"], "first", kernel_shape=[3, 3]),
        helper.make_node("Mul", ["first", factor_name], ["scaled"], "mul"),
        helper.make_node("Relu", ["scaled"], ["relu"], "relu"),
        helper.make_node("Conv", ["relu", "w2", "b2"], ["second"], "second", kernel_shape=[1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "names",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 6, 6])],
        [helper.make_tensor_value_info("second", TensorProto.FLOAT, [2, 5, 4, 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def exported(proto, folder, placement="fast"):
    amct.onnx_model.quantize(proto, DATA).save(folder / "q", formats=FORMATS, placement=placement)
    return {name: onnx.load(folder / f"q_{name}_model.onnx") for name in FORMATS}


def names_of(proto):
    tensors = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    return tensors | {node.name for node in proto.graph.node} | {one.name for one in proto.graph.initializer}


@pytest.mark.parametrize("placement", ["fast", "exact"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_constant_may_be_called_like_anything_that_an_export_adds(kind, placement, tmp_path):
    plain = exported(network(), tmp_path, placement)[kind]
    own = names_of(network())
    added = sorted(name for name in names_of(plain) - own if name)
    assert len(added) > 5
    for name in added:
        got = exported(network(name), tmp_path, placement)[kind]
        outputs = [output for node in got.graph.node for output in node.output]
        stored = [one.name for one in got.graph.initializer]
        assert len(outputs) == len(set(outputs)), name
        assert len(stored) == len(set(stored)), name
        assert not set(outputs) & set(stored), name
        for one in got.graph.initializer:
            if one.name == name:  # the fast QDQ file stores its integers instead
                np.testing.assert_array_equal(numpy_helper.to_array(one), FACTOR)
        if kind != "deploy":  # its operators are those of the chip
            results = [
                onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": DATA})[0]
                for proto in (plain, got)
            ]
            np.testing.assert_array_equal(*results)
