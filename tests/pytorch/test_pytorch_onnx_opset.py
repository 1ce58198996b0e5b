from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.onnx.rewrites import lower_opset

INT64 = np.int64


def model_of(op_type: str, *constants, shape=(2, 3, 4, 6), outputs=("y",), dtype=TensorProto.FLOAT, **attributes):
    """A model of opset 18 with one node; None among the constants is an input left out."""
    names = ["" if value is None else f"c{index}" for index, value in enumerate(constants)]
    stored = [numpy_helper.from_array(np.asarray(v), n) for n, v in zip(names, constants, strict=True) if n]
    node = helper.make_node(op_type, ["x", *names], list(outputs), name="node", **attributes)
    value = helper.make_tensor_value_info("x", dtype, shape)
    results = [helper.make_tensor_value_info(name, dtype, None) for name in outputs]
    graph = helper.make_graph([node], "graph", [value], results, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    value = session.get_inputs()[0]
    data = np.random.RandomState(0).standard_normal(value.shape)
    return session.run(None, {"x": data.astype(np.float16 if "float16" in value.type else np.float32)})


REDUCTIONS = ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
NORM = (np.linspace(0.5, 1.5, 6, dtype=np.float32), np.linspace(-1, 1, 6, dtype=np.float32))
HALF = tuple(part.astype(np.float16) for part in NORM)

LOWERED = {
    **{f"Reduce{name}": model_of(f"Reduce{name}", np.array([1, -1], INT64), keepdims=0) for name in REDUCTIONS},
    "reduce everything": model_of("ReduceMean", keepdims=0),
    "pad some axes": model_of("Pad", np.array([1, 2, 0, 3], INT64), np.float32(0.5), np.array([1, -1], INT64)),
    "pad all axes": model_of("Pad", np.array([0, 0, 1, 1, 0, 0, 2, 2], INT64)),
    "wrap": model_of("Pad", np.array([0, 0, 1, 2, 0, 0, 3, 0], INT64), mode="wrap"),
    "split": model_of("Split", axis=1, num_outputs=3, outputs=("y", "z", "w")),
    "split by sizes": model_of("Split", np.array([1, 2], INT64), axis=1, outputs=("y", "z")),
    "resize": model_of(
        "Resize", None, np.array([1, 1, 2, 2], np.float32), mode="nearest", keep_aspect_ratio_policy="stretch"
    ),
    "mish": model_of("Mish"),
    "layer norm": model_of("LayerNormalization", *NORM, axis=-1, epsilon=1e-3),
    "layer norm from an axis on": model_of(
        "LayerNormalization", np.linspace(0.5, 1.5, 24, dtype=np.float32).reshape(4, 6), axis=2
    ),
    "layer norm in half": model_of("LayerNormalization", *HALF, dtype=TensorProto.FLOAT16),
    "scatter": model_of(
        "ScatterElements", np.array([[[[1]]]], INT64), np.array([[[[5]]]], np.float32), reduction="add"
    ),
    "untouched": model_of("Relu"),
}


@pytest.mark.parametrize("opset", [16, 17])
@pytest.mark.parametrize("name", LOWERED)
def test_a_lowered_model_computes_the_same(name: str, opset: int):
    original = LOWERED[name]
    lowered = lower_opset(original, opset)
    assert lowered.opset_import[0].version == opset
    onnx.checker.check_model(lowered, full_check=True)
    assert [value.name for value in lowered.graph.output] == [value.name for value in original.graph.output]
    for found, expected in zip(run(lowered), run(original), strict=True):
        rounding = 16 * np.finfo(expected.dtype).eps * max(float(np.abs(expected).max()), 1.0)
        assert found.dtype == expected.dtype
        assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() <= rounding


def test_wrap_is_spelled_out_for_18_too():
    lowered = lower_opset(LOWERED["wrap"], 18)
    assert lowered.opset_import[0].version == 18
    assert "Pad" not in {node.op_type for node in lowered.graph.node}
    np.testing.assert_array_equal(run(lowered)[0], run(LOWERED["wrap"])[0])


def test_wrap_stays_from_19_on():
    assert lower_opset(LOWERED["wrap"], 19) is LOWERED["wrap"]


def with_computed(position: int, model: onnx.ModelProto) -> onnx.ModelProto:
    """Let an input of the node be computed while the model runs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    old = changed.graph.node[0].input[position]
    changed.graph.node[0].input[position] = "computed"
    seconds = helper.make_node("Mul", [old, "size"], ["computed"], name="times_size")
    changed.graph.node.insert(0, seconds)
    changed.graph.node.insert(0, helper.make_node("Size", [changed.graph.input[0].name], ["size"], name="count"))
    return changed


def inside_if() -> onnx.ModelProto:
    branch = helper.make_graph(
        [helper.make_node("Mish", ["x"], ["inner"], name="inner_mish")],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2,))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2,))],
        [numpy_helper.from_array(np.array(True), "c")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


SCATTER = (np.array([[[[1]]]], INT64), np.array([[[[5]]]], np.float32))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_computed(1, LOWERED["ReduceMax"]), '"node" .ReduceMax.: its axes are computed'),
        (model_of("ReduceMax", None, noop_with_empty_axes=1), "it reduces nothing"),
        (
            model_of("Split", axis=3, num_outputs=4, outputs=("a", "b", "c", "d")),
            "4 parts that are not known to be equal",
        ),
        (model_of("Resize", None, np.array([1, 1, 2, 2], np.float32), mode="linear", antialias=1), "antialias=1"),
        (model_of("ScatterElements", *SCATTER, reduction="max"), 'reduction="max"'),
        (with_computed(1, LOWERED["pad some axes"]), "its axes or pads are computed"),
        (with_computed(1, LOWERED["wrap"]), "its pads are negative or computed"),
        (model_of("BitwiseNot", shape=(2,), dtype=TensorProto.INT32), "opset 16 has no such operator"),
        (inside_if(), '"inner_mish" .Mish.: it is inside If'),
    ],
    ids=["axes", "noop", "unequal", "antialias", "reduction", "pads", "wrap", "unknown operator", "subgraph"],
)
def test_what_cannot_be_lowered_is_refused(model: onnx.ModelProto, message: str):
    with pytest.raises(ExportError, match=message + r".*; choose a higher opset"):
        lower_opset(model, 16)


def test_layer_norm_whose_mean_is_used():
    model = model_of("LayerNormalization", *NORM, outputs=("y", "mean"))
    with pytest.raises(ExportError, match="its mean or deviation is used"):
        lower_opset(model, 16)
