"""The output of a convolution that is only added has the range with the least error in placement ``fast``."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import amct.onnx_model as amct
from amct.export.qdq.tensor_observers import tensor_observers
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.min_max import MinMaxObserver


def block():
    """``x + second(relu(first(x)))``, then a convolution; one channel of ``second`` has rare, large values."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(8, 8, 1, 1)).astype(np.float32) / 3 for name in ("a", "b", "c")}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["first"], name="first"),
        helper.make_node("Relu", ["first"], ["positive"]),
        helper.make_node("Conv", ["positive", "b"], ["second"], name="second"),
        helper.make_node("Add", ["x", "second"], ["sum"]),
        helper.make_node("Conv", ["sum", "c"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 64, 64])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def data(seed):
    values = np.random.default_rng(seed).normal(size=(1, 8, 64, 64))
    values[:, :, 0, 0] *= 3  # rare outliers
    return values.astype(np.float32)


def test_only_the_addend_is_searched():
    found = tensor_observers(("sum", "second"), {"second"})
    assert isinstance(found["second"], HfmgObserver)
    assert isinstance(found["sum"], MinMaxObserver)


def test_the_addend_has_a_finer_step_than_its_whole_range_needs(tmp_path):
    quantized = amct.quantize(block(), [data(seed) for seed in range(4)])
    observers = quantized.prepared.tensor_observers()
    assert [name for name, each in observers.items() if isinstance(each, HfmgObserver)] == ["second"]
    quantized.save(tmp_path / "net", ("qdq",), check=False)
    model = onnx.load(tmp_path / "net_qdq_model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (step,) = (
        float(stored[node.input[1]])
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == "second"
    )
    float_model = block()
    float_model.graph.output.append(helper.make_tensor_value_info("second", TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(float_model.SerializeToString())
    values = [session.run(["second"], {"x": data(seed)})[0] for seed in range(4)]
    whole = (max(each.max() for each in values) - min(each.min() for each in values)) / 255
    assert step < 0.95 * whole  # with the whole range it would be at least 1
