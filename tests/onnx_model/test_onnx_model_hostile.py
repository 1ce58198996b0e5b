"""ONNX files that need endless time or memory, or whose names are no text: one error, and nothing is allocated."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_nets import graph_model, node, normal

import amct.onnx_model
from amct.errors import CalibrationError, FileError, ModelError, ParseError
from amct.export.onnx.checked import LIMIT_VARIABLE
from amct.export.onnx.runtime import SECONDS_VARIABLE, Runner
from amct.onnx_model.reading import read_model

IMAGE = np.zeros((1, 3, 4, 4), np.float32)


def model_of(nodes, functions=(), initializers=(), output="y", shape=(1, 3, 4, 4)):
    """A model with the input ``x``; the output has no declared shape."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
    graph = helper.make_graph(
        nodes, "g", [value], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)], list(initializers)
    )
    imports = [helper.make_opsetid("", 17), *([helper.make_opsetid("f", 1)] if functions else [])]
    return helper.make_model(graph, functions=list(functions), opset_imports=imports, ir_version=8)


def function(name, called, calls=2):
    """A function that applies ``called`` of its own domain several times."""
    names = ["a", *(f"t{index}" for index in range(calls - 1)), "b"]
    nodes = [
        helper.make_node(called, [source], [target], domain="" if called == "Relu" else "f")
        for source, target in pairwise(names)
    ]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, ["a"], ["b"], nodes, imports)


def nested(depth):
    functions = [function("f0", "Relu"), *(function(f"f{level}", f"f{level - 1}") for level in range(1, depth))]
    return model_of([helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="f")], functions)


def test_functions_that_double_forty_times():
    with pytest.raises(ParseError, match=r"its functions expand to 1099511627776 nodes; the limit is 1000000"):
        read_model(nested(40))
    assert len(read_model(nested(6)).model.graph.node) == 64


def test_a_function_that_calls_itself():
    loop = [function("f0", "f1"), function("f1", "f0")]
    with pytest.raises(ParseError, match=r'function "f\d" calls itself'):
        read_model(model_of([helper.make_node("f0", ["x"], ["y"], domain="f")], loop))


def concats(source, count, initializers=()):
    names = [source, *(f"t{index}" for index in range(count - 1)), "y"]
    pairs = pairwise(names)
    return model_of(
        [helper.make_node("Concat", [a, a], [b], axis=1) for a, b in pairs], initializers=initializers
    )  # fmt: skip


def test_activations_that_double_forty_times(monkeypatch):
    with pytest.raises(
        ModelError, match=rf'tensor "\w+" would have shape \[1, \d+, 4, 4\], more than .*{LIMIT_VARIABLE}'
    ):
        amct.onnx_model.quantize(concats("x", 40), IMAGE)
    read_model(concats("x", 8))
    monkeypatch.setenv(LIMIT_VARIABLE, "1000")
    with pytest.raises(ModelError, match="would have shape"):
        read_model(concats("x", 8))
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    with pytest.raises(ModelError, match="must be a number of bytes, got 'many'"):
        read_model(concats("x", 8))


@pytest.mark.parametrize("operator", ["ConstantOfShape", "Expand", "Tile"])
def test_constants_that_grow_from_a_small_number(operator):
    huge = numpy_helper.from_array(np.array([1, 2**40], np.int64), "size")
    one = numpy_helper.from_array(np.ones((1, 1), np.float32), "one")
    inputs = ["size"] if operator == "ConstantOfShape" else ["one", "size"]
    nodes = [
        helper.make_node(operator, inputs, ["big"]),
        helper.make_node("ReduceMax", ["big"], ["small"], keepdims=0),
        helper.make_node("Add", ["x", "small"], ["y"]),
    ]
    with pytest.raises(ModelError, match=r'tensor "big" would have shape \[1, 1099511627776\]'):
        amct.onnx_model.quantize(model_of(nodes, initializers=[huge, one]), IMAGE)


def loop(condition_out, trips=None):
    """A Loop that adds x to its state; its body ends with ``condition_out`` nodes for the next condition."""
    body = helper.make_graph(
        [helper.make_node("Relu", ["state"], ["next"]), *condition_out],
        "body",
        [
            helper.make_tensor_value_info("index", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    stored = [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array(7, np.int64), "seven")]
    if trips is not None:
        stored.append(numpy_helper.from_array(np.array(trips, np.int64), "trips"))
    nodes = [helper.make_node("Loop", ["" if trips is None else "trips", "yes", "x"], ["y"], name="spin", body=body)]
    return model_of(nodes, initializers=stored)


STAYS = [helper.make_node("Identity", ["go"], ["again"])]
TRUE = [helper.make_node("Constant", [], ["again"], value=numpy_helper.from_array(np.array(True)))]
COUNTS = [helper.make_node("Less", ["index", "seven"], ["again"])]


@pytest.mark.parametrize("condition", [STAYS, TRUE])
@pytest.mark.parametrize("trips", [None, 2**62])
def test_a_loop_without_end(condition, trips):
    with pytest.raises(ModelError, match=r'Loop "spin" never ends: its condition is always true'):
        read_model(loop(condition, trips))


@pytest.mark.parametrize(("condition", "trips"), [(STAYS, 10), (COUNTS, None), (COUNTS, 2**62)])
def test_a_loop_that_ends(condition, trips):
    assert read_model(loop(condition, trips)).model.graph.node[0].op_type == "Loop"


def test_a_loop_whose_condition_is_computed_is_stopped(monkeypatch):
    endless = [helper.make_node("Less", ["minus", "index"], ["again"])]
    model = loop(endless)
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.int64), "minus"))
    monkeypatch.setenv(SECONDS_VARIABLE, "1")
    with pytest.raises(CalibrationError, match=rf"one batch in 1 seconds: .*set {SECONDS_VARIABLE}"):
        Runner(model).run({"x": IMAGE})
    monkeypatch.setenv(SECONDS_VARIABLE, "soon")
    with pytest.raises(ModelError, match="must be a number of seconds, got 'soon'"):
        Runner(model).run({"x": IMAGE})


@pytest.mark.parametrize("kind", [0, 65536])
def test_an_input_of_an_unknown_type(kind):
    model = graph_model([node("Conv", "x w", "y", "conv")], {"w": normal(2, 3, 1, 1)}, IMAGE.shape)
    model.graph.input[0].type.tensor_type.elem_type = kind
    with pytest.raises(ParseError, match="model is not a valid ONNX model"):
        read_model(model)


@pytest.mark.parametrize("old", [b"first", b"weight", b"hidden"])
def test_names_that_are_no_text(old, tmp_path):
    model = graph_model(
        [node("Conv", "x weight", "hidden", "first"), node("Relu", "hidden", "y", "second")],
        {"weight": normal(2, 3, 1, 1)},
        IMAGE.shape,
    )
    content = model.SerializeToString()
    (tmp_path / "net.onnx").write_bytes(content.replace(old, b"\xff" * len(old)))
    for given in (tmp_path / "net.onnx", (tmp_path / "net.onnx").read_bytes()):
        with pytest.raises(ParseError, match=r"is not UTF-8 text: b'\\xff.*Export the model again"):
            amct.onnx_model.quantize(given, IMAGE)


def test_external_data_with_a_nul_character_in_its_path(tmp_path):
    model = graph_model([node("Conv", "x w", "y", "conv")], {"w": normal(2, 3, 1, 1)}, IMAGE.shape)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="a\0b")
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FileError, match=r'tensor "w" is kept in'):
        read_model(tmp_path / "net.onnx")
