"""ONNX files that need endless time or memory, or whose names are no text: one error, and nothing is allocated."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, inliner, numpy_helper
from onnx_nets import graph_model, node, normal

import amct.onnx_model
from amct.errors import CalibrationError, FileError, ModelError, ParseError
from amct.export.check.running import LoadedModel
from amct.export.onnx import runtime
from amct.export.onnx.messages import LIMIT_VARIABLE, MODEL_LIMIT_VARIABLE
from amct.export.onnx.runtime import DEFAULT_SECONDS, LOOP_SECONDS, SECONDS_VARIABLE, Runner, longest_run
from amct.onnx_model.reading import read_model
from amct.pytorch.onnx.modified_onnx import read_modified

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


def test_functions_whose_constants_double(monkeypatch):
    """A constant of a kilobyte in a function that is called 64 times."""
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros(256, np.float32)))
    cut = helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0)
    add = helper.make_node("Add", ["a", "m"], ["b"])
    inner = helper.make_function("f", "f0", ["a"], ["b"], [constant, cut, add], [helper.make_opsetid("", 17)])
    functions = [inner, *(function(f"f{level}", f"f{level - 1}") for level in range(1, 7))]
    model = model_of([helper.make_node("f6", ["x"], ["y"], domain="f")], functions)
    read_model(model)
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(64 * 1024))
    monkeypatch.setattr(inliner, "inline_local_functions", lambda _: pytest.fail("the functions were expanded"))
    with pytest.raises(ModelError, match=rf"its functions expand to nodes of .*{MODEL_LIMIT_VARIABLE}"):
        read_model(model)


def concats(source, count, initializers=(), axis=1, shape=(1, 3, 4, 4)):
    names = [source, *(f"t{index}" for index in range(count - 1)), "y"]
    pairs = pairwise(names)
    nodes = [helper.make_node("Concat", [a, a], [b], axis=axis) for a, b in pairs]
    return model_of(nodes, initializers=initializers, shape=shape)


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


TOO_MUCH = rf"the model holds tensors of .* GiB at the same time; .*a smaller batch; .*{MODEL_LIMIT_VARIABLE}"


def relus(count, last="Sum", shape=(1, 3, 4, 4)):
    """Tensors of 192 bytes, all of which a last node reads."""
    nodes = [helper.make_node("Relu", ["x"], [f"t{index}"], name=f"n{index}") for index in range(count)]
    return model_of([*nodes, helper.make_node(last, [f"t{index}" for index in range(count)], ["y"])], shape=shape)


@pytest.fixture
def no_session(monkeypatch):
    """Nothing is loaded, so that nothing is allocated."""
    monkeypatch.setattr(runtime, "open_session", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.usefixtures("no_session")
def test_tensors_that_exist_at_the_same_time(monkeypatch):
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(10 * 192))
    read_model(relus(9))
    with pytest.raises(ModelError, match=rf'with node "n10" \(Relu\) {TOO_MUCH}'):
        amct.onnx_model.quantize(relus(100), IMAGE)
    read_model(model_of([helper.make_node("Relu", [a], [b]) for a, b in pairwise(["x", *"abcdefghijklmno", "y"])]))


@pytest.mark.usefixtures("no_session")
def test_bodies_are_checked_too():
    names = ["x", *(f"t{index}" for index in range(39)), "z"]
    nodes = [helper.make_node("Concat", [a, a], [b], axis=1) for a, b in pairwise(names)]
    body = helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)
    stored = [numpy_helper.from_array(np.array(True), "yes")]
    with pytest.raises(ModelError, match=rf'tensor "\w+" would have shape .*{LIMIT_VARIABLE}'):
        amct.onnx_model.quantize(model_of([branch], initializers=stored), IMAGE)


def test_dynamic_axes_are_checked_with_the_batch(monkeypatch):
    """A Concat along the dynamic axis has no known size in the file."""
    model = concats("x", 40, axis=0, shape=("n", 3, 4, 4))
    with pytest.raises(ModelError, match=rf'tensor "\w+" would have shape \[\d+, 3, 4, 4\].*{LIMIT_VARIABLE}'):
        Runner(read_model(model).model).run({"x": IMAGE})
    runner = Runner(read_model(relus(5, shape=("n", 3, 4, 4))).model)
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(12 * 192))
    runner.run({"x": IMAGE})
    with pytest.raises(ModelError, match=rf'with node "n4" \(Relu\) {TOO_MUCH}'):
        runner.run({"x": np.repeat(IMAGE, 3, axis=0)})


def test_watched_tensors_are_held_until_the_end(monkeypatch):
    names = [f"t{index}" for index in range(20)]
    model = model_of([helper.make_node("Relu", [a], [b], name=b) for a, b in pairwise(["x", *names, "y"])])
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(10 * 192))
    Runner(model).run({"x": IMAGE})
    with pytest.raises(ModelError, match=rf'with node "t10" \(Relu\) {TOO_MUCH}'):
        Runner(model, names).run({"x": IMAGE})


def test_many_tensors_in_the_same_bytes_of_one_file(tmp_path, monkeypatch):
    weights = {f"w{index}": normal(64) for index in range(20)}
    nodes = [node("Add", f"{a} w{index}", b, f"n{index}") for index, (a, b) in enumerate(pairwise(["x", *"abcd", "y"]))]
    model = graph_model(nodes, weights, (1, 64))
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="data.bin")
    (tmp_path / "data.bin").write_bytes(bytes(256))
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    read_model(tmp_path / "net.onnx")
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(10 * 256))
    monkeypatch.setattr(onnx, "load_external_data_for_model", lambda *_: pytest.fail("the data was read"))
    with pytest.raises(ModelError, match=rf'with tensor "w10" .* {MODEL_LIMIT_VARIABLE}'):
        read_model(tmp_path / "net.onnx")


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
    with pytest.raises(ModelError, match=rf"one batch in 1 seconds: .*set {SECONDS_VARIABLE}"):
        LoadedModel(model).run({"x": IMAGE})
    monkeypatch.setenv(SECONDS_VARIABLE, "soon")
    with pytest.raises(ModelError, match="must be a number of seconds, got 'soon'"):
        Runner(model).run({"x": IMAGE})
    monkeypatch.delenv(SECONDS_VARIABLE)
    assert longest_run(model) == LOOP_SECONDS == 60
    assert longest_run(relus(2)) == DEFAULT_SECONDS


@pytest.mark.parametrize("model", [loop(STAYS), concats("x", 40)], ids=["loop", "concats"])
def test_a_modified_file_from_elsewhere(model, tmp_path):
    """What ``save_model`` reads and then runs."""
    (tmp_path / "modified.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r'modified\.onnx": (Loop "spin" never ends|tensor "\w+" would have shape)'):
        read_modified(tmp_path / "modified.onnx")


def test_a_loop_that_collects_without_end_is_stopped_by_its_memory(monkeypatch):
    """Each repetition adds a copy of the state to the second output of the Loop."""
    model = loop(
        [helper.make_node("Less", ["minus", "index"], ["again"]), helper.make_node("Relu", ["state"], ["out"])]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.int64), "minus"))
    model.graph.node[0].attribute[0].g.output.append(helper.make_tensor_value_info("out", TensorProto.FLOAT, None))
    model.graph.node[0].output.append("all")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 64, 64]))
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, str(64 * 2**20))
    with pytest.raises(
        CalibrationError, match=rf"one batch of the model needs more than 0.1 GiB.*{MODEL_LIMIT_VARIABLE}"
    ):
        Runner(model).run({"x": np.zeros((1, 3, 64, 64), np.float32)})


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


def operations(action):
    """How many operations of this package's Python code an action takes: the same number in every run."""
    package, count, before = str(Path(amct.__file__).parent), 0, sys.gettrace()

    def inside(_, event, __):
        nonlocal count
        count += event == "opcode"
        return inside

    def entered(frame, *_):
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    sys.settrace(entered)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_one_weight_of_many_convolutions_is_saved_in_linear_time(tmp_path):
    """Four times the layers need four times the operations and bytes; each layer has its own integers."""
    counts, sizes = [], []
    for layers in (20, 80):
        names = ["x", *(f"t{index}" for index in range(layers - 1)), "y"]
        nodes = [node("Conv", f"{a} w", b, f"c{b}", pads=[1, 1, 1, 1]) for a, b in pairwise(names)]
        model = graph_model(nodes, {"w": normal(3, 3, 3, 3) / 5}, IMAGE.shape)
        quantized = amct.onnx_model.quantize(model, np.ones_like(IMAGE))
        assert len(quantized.record) == layers
        counts.append(operations(lambda: quantized.save(tmp_path / f"net{layers}", check=False)))  # noqa: B023  called now
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob(f"net{layers}_*")))
    assert counts[1] < 4.2 * counts[0]  # quadratic: 16
    assert sizes[1] < 4.2 * sizes[0]
