"""Reading ONNX files: whatever is wrong with one is a clear error, and what is unusual is brought into form."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_nets import graph_model, node, normal, products, run

import amct.onnx_model as amct
from amct.errors import AmctError, ArgumentTypeError, ConfigError, ExportError, FileError, ModelError, ParseError
from amct.export.onnx.kept_weights import LARGEST_CONSTANT
from amct.onnx_model.layers import find_all_layers
from amct.onnx_model.reading import read_model, with_opset


def test_a_path_bytes_and_a_model_are_read_alike(tmp_path):
    model = products()
    onnx.save(model, tmp_path / "net.onnx")
    before = model.SerializeToString()
    from_path, from_bytes, from_model = (read_model(each) for each in (tmp_path / "net.onnx", before, model))
    assert from_path.model == from_bytes.model == from_model.model
    assert (from_path.name, from_model.name) == ("net", "hand_made")
    assert model.SerializeToString() == before


def test_nodes_get_names_of_their_own():
    nodes = [
        node("Relu", "x", "a", "twice"),
        node("Relu", "a", "b", "twice"),
        node("Relu", "b", "c"),
        node("Relu", "c", "y", "Relu_c"),
    ]
    names = [each.name for each in read_model(graph_model(nodes, {}, ("n",))).model.graph.node]
    assert names == ["twice", "twice_1", "Relu_c_1", "Relu_c"]


def test_local_functions_are_expanded():
    domain = [helper.make_opsetid("", 17)]
    function = helper.make_function("own", "Double", ["a"], ["b"], [node("Add", "a a", "b")], domain)
    model = graph_model([helper.make_node("Double", ["x"], ["y"], domain="own")], {}, ("n", 3))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.append(function)
    read = read_model(model).model
    assert [each.op_type for each in read.graph.node] == ["Add"]


def test_weights_among_the_inputs_are_no_inputs():
    model = products()
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    model.ir_version = 3
    read = read_model(model).model
    assert [value.name for value in read.graph.input] == ["x"]
    assert run(read, {"x": normal(2, 6)})[0].shape == (2, 4)


def test_external_data_beside_the_model_is_read(tmp_path):
    model = products()
    onnx.save(model, tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    stored = onnx.load(tmp_path / "net.onnx", load_external_data=False)
    assert stored.graph.initializer[0].data_location == TensorProto.EXTERNAL
    np.testing.assert_array_equal(
        numpy_helper.to_array(read_model(tmp_path / "net.onnx").model.graph.initializer[0]), normal(6, 8)
    )
    with pytest.raises(ParseError, match="give the path of the model instead"):
        read_model(stored)


@pytest.mark.parametrize("location", ["../secret.data", "/etc/passwd", "", "link.data"])
def test_external_data_outside_the_folder_is_not_read(location, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.data").write_bytes(bytes(6 * 8 * 4))
    (folder / "link.data").symlink_to(tmp_path / "secret.data")
    onnx.save(external(location), folder / "net.onnx")
    with pytest.raises(FileError, match="outside the folder of the model; it is not read"):
        read_model(folder / "net.onnx")


def external(location: str, **entries: str) -> onnx.ModelProto:
    model = products()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return model


def test_external_data_that_is_missing_or_too_short(tmp_path):
    onnx.save(external("none.data"), tmp_path / "missing.onnx")
    with pytest.raises(FileError, match=r'"none\.data", which does not exist'):
        read_model(tmp_path / "missing.onnx")
    (tmp_path / "short.data").write_bytes(bytes(10))
    onnx.save(external("short.data"), tmp_path / "short.onnx")
    with pytest.raises((FileError, ParseError), match=r"short\.onnx"):
        read_model(tmp_path / "short.onnx")


def cyclic():
    return graph_model([node("Add", "x b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")], {}, ("n",))


def with_initializer(tensor: TensorProto) -> onnx.ModelProto:
    model = products()
    tensor.name = "w"
    model.graph.initializer[0].CopyFrom(tensor)
    return model


def without_inputs():
    model = graph_model([node("Relu", "w", "y")], {"w": normal(3)}, ("n",))
    del model.graph.input[:]
    return model


BAD = {
    "cyclic": (cyclic, "not a valid ONNX model: .*sorted"),
    "missing input": (lambda: graph_model([node("Add", "x none", "y")], {}, ("n",)), "not a valid ONNX model"),
    "missing output": (lambda: graph_model([node("Relu", "x", "z")], {}, ("n",)), "not a valid ONNX model"),
    "unknown operator": (lambda: graph_model([node("Conf", "x", "y")], {}, ("n",)), "not a valid ONNX model: .*Conf"),
    "no inputs": (without_inputs, "has no inputs"),
    "no nodes": (lambda: graph_model([], {}, ("n",)), "it has no nodes"),
    "too little data": (
        lambda: with_initializer(TensorProto(data_type=1, dims=[6, 8], raw_data=bytes(8))),
        'the data of tensor "w" is damaged',
    ),
    "huge shape": (
        lambda: with_initializer(TensorProto(data_type=1, dims=[2**40, 2**20], raw_data=bytes(8))),
        'the data of tensor "w" is damaged',
    ),
    "negative shape": (
        lambda: with_initializer(TensorProto(data_type=1, dims=[-6, -8], raw_data=bytes(192))),
        'the data of tensor "w" is damaged: negative size',
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_a_broken_model_is_one_clear_error(make, message):
    with pytest.raises(ParseError, match=message) as error:
        read_model(make())
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(FileError, match=r"none\.onnx"):
        read_model(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("this is no protobuf at all")
    with pytest.raises(ParseError, match=r'text\.onnx" is not an ONNX model'):
        read_model(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ParseError, match="it has no nodes"):
        read_model(tmp_path / "empty.onnx")
    with pytest.raises(
        ArgumentTypeError, match="model: expected the path of an ONNX file, its bytes or a ModelProto, got int"
    ):
        read_model(5)


@given(st.data())
def test_truncated_and_damaged_files_never_crash(data):
    content = bytearray(products().SerializeToString())
    end = data.draw(st.integers(0, len(content)))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(AmctError):  # any other error, or a crash, fails
        find_all_layers(read_model(bytes(content[:end])).model)


@pytest.mark.parametrize("operator", ["QuantizeLinear", "QLinearConv"])
def test_quantized_models_are_refused(operator):
    model = graph_model([node(operator, "x s z", "y", "q")], {"s": normal(1), "z": np.zeros(1, np.uint8)}, ("n",))
    with pytest.raises(ModelError, match=f'already quantized: node "q" is a {operator}; start from the float model'):
        read_model(model)


def test_own_files_are_refused_too(tmp_path):
    amct.quantize(products(), normal(8, 6)).save(tmp_path / "q", formats=("qdq", "deploy"))
    for kind, operator in (("qdq", "QuantizeLinear"), ("deploy", "AscendQuant")):
        with pytest.raises(ModelError, match=f"already quantized: .*{operator}"):
            read_model(tmp_path / f"q_{kind}_model.onnx")


# -- opsets ------------------------------------------------------------------------------------------------------------


def large(opset: int) -> onnx.ModelProto:
    """A Softmax changed its meaning in opset 13, a Unsqueeze got its axes as an input; the weight is no constant."""
    nodes = [
        node("MatMul", "x w", "a", "product"),
        node("Softmax", "a", "b", "softmax", axis=1),
        node("Unsqueeze", "b", "y", "unsqueeze", axes=[0]),
    ]
    return graph_model(nodes, {"w": normal(6, LARGEST_CONSTANT // 6 + 1)}, (2, 6), opset=opset)


def test_old_opsets_are_converted_and_names_stay():
    read = read_model(large(11)).model
    assert read.opset_import[0].version == 16
    assert {"product", "softmax", "unsqueeze"} <= {each.name for each in read.graph.node}
    np.testing.assert_allclose(run(read, {"x": normal(2, 6)})[0], run(large(11), {"x": normal(2, 6)})[0], rtol=1e-6)


def test_what_cannot_be_converted_is_said():
    model = graph_model([node("Gelu", "x", "y", "gelu")], {}, ("n", 4), opset=20)
    with pytest.raises(ModelError, match=r"has opset 20 and cannot be converted to 16: .*Gelu.*export it again"):
        with_opset(read_model(model).model, 16)


# -- layers and the reasons against them -------------------------------------------------------------------------------


def reasons(nodes, weights, shape, **kinds):
    layers = find_all_layers(read_model(graph_model(nodes, weights, shape, **kinds)).model)
    return {skip.layer: skip.reason for skip in layers.skips}, {name: each.type for name, each in layers.found.items()}


W4, W5 = normal(4, 3, 1, 1), normal(4, 3, 1, 1, 1)
SKIPPED = {
    "computed weight": ([node("Conv", "x x", "y", "n")], {}, (4, 4, 1, 1), "is computed; only constant weights"),
    "weight in front": ([node("MatMul", "w x", "y", "n")], {"w": normal(3, 4)}, (4, 3), "its first operand is"),
    "one dimension": ([node("MatMul", "x w", "y", "n")], {"w": normal(4)}, (3, 4), "expected a weight of 2 dimensions"),
    "alpha": ([node("Gemm", "x w", "y", "n", alpha=0.5)], {"w": normal(4, 3)}, (2, 4), "alpha=1, beta=1"),
    "column bias": (
        [node("Gemm", "x w b", "y", "n")],
        {"w": normal(4, 3), "b": normal(3, 1)},
        (3, 4),
        "expected a bias of 3 values",
    ),
    "transposed 3d": (
        [node("ConvTranspose", "x w", "y", "n")],
        {"w": normal(3, 4, 1, 1, 1)},
        (1, 3, 2, 2, 2),
        "ConvTranspose over 3 dimensions cannot be quantized, only over 1, 2",
    ),
    "pooling 1d": (
        [node("AveragePool", "x", "y", "n", kernel_shape=[2])],
        {},
        (1, 3, 4),
        "AveragePool over 1 dimensions cannot be quantized, only over 2",
    ),
    "dilated 3d": (
        [node("Conv", "x w", "y", "n", dilations=[2, 1, 1])],
        {"w": W5},
        (1, 3, 4, 4, 4),
        "the first must be 1 in a quantized Conv3d",
    ),
    "other operators": ([node("PRelu", "x w", "y", "n")], {"w": normal(1)}, (2, 3), "PRelu is not quantizable"),
    "unused": (
        [node("Conv", "x w", "a", "n"), node("Relu", "x", "y", "r")],
        {"w": W4},
        (1, 3, 2, 2),
        "no output of the model depends on it",
    ),
    "constant input": (
        [node("Conv", "w w", "a", "n"), node("Add", "a x", "y")],
        {"w": normal(3, 3, 1, 1)},
        (1,),
        "its input is a constant",
    ),
}


@pytest.mark.parametrize(("nodes", "weights", "shape", "reason"), SKIPPED.values(), ids=SKIPPED)
def test_what_stays_float_has_a_reason(nodes, weights, shape, reason):
    skips, found = reasons(nodes, weights, shape)
    assert reason in skips["n"]
    assert "n" not in found


RECURRENT = {
    "two directions": ({"direction": "bidirectional"}, 2, 'direction is "bidirectional"'),
    "backwards": ({"direction": "reverse"}, 1, 'direction is "reverse"'),
    "batch first": ({"layout": 1}, 1, "layout is 1"),
    "other activations": ({"activations": ["Relu", "Tanh", "Tanh"]}, 1, "its activations are"),
}


@pytest.mark.parametrize(("settings", "directions", "reason"), RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_that_have_no_quantized_form(settings, directions, reason):
    weights = {"w": normal(directions, 12, 4), "r": normal(directions, 12, 3)}
    skips, _ = reasons([node("LSTM", "x w r", "y", "n", hidden_size=3, **settings)], weights, (5, 2, 4))
    assert reason in skips["n"]


def test_a_gru_that_resets_before_the_product():
    weights = {"w": normal(1, 9, 4), "r": normal(1, 9, 3)}
    skips, _ = reasons([node("GRU", "x w r", "y", "n", hidden_size=3)], weights, (5, 2, 4))
    assert "linear_before_reset is 0" in skips["n"]


def test_layers_inside_a_branch_are_told():
    branch = helper.make_graph(
        [node("MatMul", "x w", "z", "inner")], "then", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    )
    other = helper.make_graph(
        [node("Identity", "x", "z2")], "else", [], [helper.make_tensor_value_info("z2", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("MatMul", "x w", "a", "outer"),
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=other),
    ]
    skips, found = reasons(nodes, {"w": normal(4, 4), "c": np.array(True)}, (2, 4), outputs=("y", "a"))
    assert "inside the body of If" in skips["if/inner"]
    assert found == {"outer": "Linear"}


def test_layers_inside_branches_are_the_reason_why_there_is_no_layer():
    branches = {
        f"{name}_branch": helper.make_graph(
            [node("Conv", "x w", f"{name}_z", name)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_z", TensorProto.FLOAT, None)],
        )
        for name in ("then", "else")
    }
    choice = helper.make_node("If", ["c"], ["y"], name="choose", **branches)
    model = graph_model([choice], {"w": normal(4, 3, 3, 3), "c": np.array(True)}, (1, 3, 8, 8))
    with pytest.raises(ConfigError, match="no layer that can be quantized") as error:
        amct.quantize(model, normal(1, 3, 8, 8))
    for name in ("then", "else"):
        assert f"choose/{name} (Conv): it is inside the body of If" in str(error.value)


def test_types_are_those_of_the_configs():
    nodes = [
        node("Conv", "x w", "a", "conv"),
        node("AveragePool", "a", "b", "pool", kernel_shape=[2, 2]),
        node("ConvTranspose", "b t", "c", "up"),
        node("Flatten", "c", "d"),
        node("Gemm", "d g", "y", "fc"),
    ]
    weights = {"w": W4, "t": normal(4, 2, 2, 2), "g": normal(18, 5)}
    _, found = reasons(nodes, weights, (1, 3, 3, 3))
    assert found == {"conv": "Conv2d", "pool": "AvgPool2d", "up": "ConvTranspose2d", "fc": "Linear"}


def test_chains_of_any_length_from_a_weight_are_no_trouble():
    doubled = [node("Concat", f"c{index} c{index}", f"c{index + 1}", axis=0) for index in range(29)]
    moved = [node("Transpose", f"i{index}", f"i{index + 1}", perm=[0, 1]) for index in range(1200)]
    short = [node("Identity", f"s{index}", f"s{index + 1}") for index in range(20)]
    products = [node("MatMul", f"x {weight}", out, name) for weight, out, name in
                (("c29", "a", "doubled"), ("i1200", "b", "long"), ("s20", "c", "short"))]  # fmt: skip
    weights = {"c0": normal(1, 1), "i0": normal(4, 4), "s0": normal(4, 4)}
    skips, found = reasons([*doubled, *moved, *short, *products], weights, (2, 4), outputs=("a", "b", "c"))
    assert "both operands are computed" in skips["long"]
    assert "doubled" in skips
    assert set(found) == {"short"}


def test_a_weight_that_cannot_be_computed_is_said():
    nodes = [node("Reshape", "w s", "v"), node("MatMul", "x v", "y", "n")]
    with pytest.raises(ExportError, match='constant "v" cannot be computed by its Reshape'):
        reasons(nodes, {"w": normal(4, 4), "s": np.array([5, 5])}, (2, 4))


def test_a_negative_dimension_is_dynamic(tmp_path):
    model = graph_model([node("MatMul", "x w", "y", "layer")], {"w": normal(4, 6)}, (-1, 4))
    quantized = amct.quantize(model, [normal(3, 4, seed=2), normal(5, 4, seed=3)])
    (file,) = [path for path in quantized.save(tmp_path / "net", ["qdq"]) if path.suffix == ".onnx"]
    assert run(str(file), {"x": normal(7, 4, seed=4)})[0].shape == (7, 6)


def _shuffled(seed):
    """A chain of ten nodes with a branch that reads an outer tensor, its nodes in a random order."""
    inner = helper.make_node("Add", ["t5", "t5"], ["inner"])
    body = helper.make_graph([inner], "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)])
    nodes = [helper.make_node("Relu", [f"t{number}"], [f"t{number + 1}"], name=f"n{number}") for number in range(8)]
    nodes.append(helper.make_node("ReduceMax", ["t8"], ["top"], keepdims=0))
    nodes.append(helper.make_node("Cast", ["top"], ["condition"], to=TensorProto.BOOL))
    nodes.append(helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body))
    order = np.random.default_rng(seed).permutation(len(nodes))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("t0", "y")]
    graph = helper.make_graph([nodes[place] for place in order], "shuffled", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("seed", range(4))
def test_nodes_in_any_order_are_sorted(seed):
    found = read_model(_shuffled(seed)).model
    written = {"t0"}
    for each in found.graph.node:
        assert {*each.input, *(["t5"] if each.op_type == "If" else [])} <= written
        written |= set(each.output)
    feeds = {"t0": np.float32([[1, -2, 3], [4, 5, -6]])}
    session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, feeds)[0], [[2, 0, 6], [8, 10, 0]])


def test_nodes_in_a_circle_are_an_error():
    nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Add", ["x", "a"], ["b"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "b")]
    model = helper.make_model(helper.make_graph(nodes, "circle", ends[:1], ends[1:]), ir_version=8)
    with pytest.raises(ParseError, match="topologically sorted"):
        read_model(model)
