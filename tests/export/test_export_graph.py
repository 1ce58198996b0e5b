"""Editing ONNX graphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import Net, residual, run
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.kept_weights import copy_fields
from amct.export.onnx.messages import attribute_value


def names(model):
    return [node.name for node in model.graph.node]


def test_an_unedited_graph_is_written_back_as_it_was():
    _, model = residual()
    assert OnnxGraph(model).build() == model


def test_inserted_nodes_are_sorted_before_their_users():
    net, model = residual()
    graph = OnnxGraph(model)
    doubled = graph.add_node("Mul", "doubled", ["half.output0", "two.output0"])
    graph.add_constant("two", np.float32(2))
    graph.add_node("Mul", "half", ["x", graph.set_initializer("one_half", np.asarray(0.5, np.float32))])
    graph.set_input(graph.node("node_stem"), 0, doubled)
    edited = graph.build()
    onnx.checker.check_model(edited, full_check=True)
    assert names(edited)[:4] == ["half", "two", "doubled", "node_stem"]
    feeds = net.data()
    np.testing.assert_array_equal(run(edited, feeds)["y"], run(model, feeds)["y"])


def test_what_nobody_uses_any_more_is_left_out():
    _, model = residual()
    graph = OnnxGraph(model)
    graph.set_input(graph.node("node_stem"), 1, graph.set_initializer("new", np.ones((8, 3, 3, 3), np.float32)))
    graph.add_constant("unused", np.float32(1))
    edited = graph.build()
    stored = {tensor.name for tensor in edited.graph.initializer}
    assert "stem.w" not in stored
    assert "new" in stored
    assert "unused" not in names(edited)


def test_tap_moves_all_users_or_keeps_the_name_of_an_output():
    _, model = residual()
    graph = OnnxGraph(model)
    read, write = graph.tap("stem_relu_out", "changed")
    graph.add_node("Neg", "neg", [read], [write])
    assert (read, write) == ("stem_relu_out", "changed")
    assert {node.name for node in graph.consumers("changed")} == {"node_first", "node_join"}
    read, write = graph.tap("y", "not_used")
    assert (read, write) == ("node_fc_output0", "y")
    graph.add_node("Neg", "neg2", [read], [write])
    onnx.checker.check_model(graph.build(), full_check=True)


def test_bodies_of_branches_count_as_users():
    net = Net()
    x = net.input("x", 3)
    y = net.add("Neg", "neg", x)
    body = helper.make_graph(
        [helper.make_node("Abs", [y], ["inner"])],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    net.add("If", "choice", net.constant("always", np.array(True)), then_branch=body, else_branch=body, outputs=["y"])
    graph = OnnxGraph(net.model("y"))
    assert graph.is_captured(y)
    assert graph.only_consumer(y) is None
    assert graph.tap(y, "other") == ("node_neg_output0", y)
    graph.add_node("Exp", "exp", ["node_neg_output0"], [y])
    edited = graph.build()
    assert names(edited) == ["node_neg", "exp", "node_choice"]
    np.testing.assert_allclose(run(edited, {"x": np.ones(3, np.float32)})["y"], np.exp(-1), rtol=1e-6)


def test_constants_are_found_through_operators_that_only_move_them():
    net = Net()
    net.input("x", 2, 6)
    w = net.weight("w", 6, 4)
    turned = net.add("Transpose", "turn", w, perm=[1, 0])
    cut = net.add("Slice", "cut", turned, *[net.constant(n, np.array([v])) for n, v in (("s", 0), ("e", 2), ("a", 0))])
    net.add("MatMul", "product", "x", net.add("Transpose", "back", cut, perm=[1, 0]), outputs=["y"])
    model = net.model("y")
    graph = OnnxGraph(model)
    stored = numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_array_equal(graph.constant("back_out"), stored[:, :2])
    assert graph.constant("x") is None
    assert graph.constant("y") is None
    assert graph.constant("") is None
    assert not graph.is_constant("y")


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_float": 1.5}, 1.5),
        ({"value_ints": [1, 2]}, [1, 2]),
        ({"value_int": 7}, 7),
        ({"value_floats": [0.5]}, [0.5]),
    ],
)
def test_every_numeric_constant_is_read(attribute, expected):
    node = helper.make_node("Constant", [], ["c"], name="c", **attribute)
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, None)])
    np.testing.assert_array_equal(OnnxGraph(helper.make_model(graph)).constant("c"), expected)


def test_a_constant_of_text_is_no_weight():
    node = helper.make_node("Constant", [], ["c"], name="words", value_string="hello")
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("c", TensorProto.STRING, None)])
    with pytest.raises(ExportError, match='Constant "words" holds no number'):
        OnnxGraph(helper.make_model(graph)).constant("c")


def test_data_in_files_that_were_not_loaded_is_said():
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    graph = helper.make_graph([], "g", [], [], [tensor])
    with pytest.raises(ExportError, match='initializer "w" is in another file'):
        OnnxGraph(helper.make_model(graph)).constant("w")


def test_initializers_listed_as_inputs_are_no_inputs():
    """Old exporters list them; then onnxruntime must not treat them as constant."""
    _, model = residual()
    model.graph.input.append(helper.make_tensor_value_info("stem.w", TensorProto.FLOAT, [8, 3, 3, 3]))
    assert [value.name for value in OnnxGraph(model).build().graph.input] == ["x"]


def test_unknown_nodes_are_named_with_the_nearest():
    _, model = residual()
    with pytest.raises(ExportError, match=r'no node "node_stm"\. Did you mean "node_stem"'):
        OnnxGraph(model).node("node_stm")


def test_names_are_never_given_twice():
    _, model = residual()
    graph = OnnxGraph(model)
    with pytest.raises(ExportError, match='cannot add Relu "node_fc": the ONNX graph already has a node'):
        graph.add_node("Relu", "node_fc", ["x"])
    graph.rename_node(graph.node("node_stem"), "node_fc")
    assert graph.node("node_fc").op_type == "Conv"
    assert graph.node("node_fc_other").op_type == "Gemm"
    assert graph.fresh_name("x_new") == "x_new"
    assert graph.fresh_name("stem.w") == "stem.w_1"


def test_nodes_without_names_get_one():
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = OnnxGraph(helper.make_model(helper.make_graph([node], "g", values[:1], values[1:])))
    assert graph.nodes[0].name == "Relu_y"


def test_inputs_and_attributes_are_replaced():
    _, model = residual()
    graph = OnnxGraph(model)
    node = graph.node("node_fc")
    graph.set_attribute(node, "alpha", 2.0)
    assert attribute_value(node, "alpha") == 2.0
    graph.drop_attribute(node, "alpha")
    assert attribute_value(node, "alpha", "absent") == "absent"
    graph.set_inputs(node, ["x", "fc.w"])
    assert list(node.input) == ["x", "fc.w"]
    assert [user.name for user in graph.consumers("x")] == ["node_stem", "node_fc"]
    assert graph.consumers("fc.b") == ()
    graph.set_attribute(node, "activations", [])
    assert node.attribute[-1].type == AttributeProto.STRINGS


def test_declared_types_of_inputs_constants_and_results():
    net = Net()
    x = net.input("x", 1, 4, dtype=TensorProto.FLOAT16)
    net.add("MatMul", "product", x, net.weight("w", 4, 3, dtype=np.float16))
    net.add("Relu", "relu", "product_out", outputs=["y"])
    graph = OnnxGraph(net.model("y", dtype=TensorProto.FLOAT16))
    assert {graph.element_type(name) for name in ("x", "w", "product_out", "y")} == {TensorProto.FLOAT16}
    assert graph.element_type("nowhere") == TensorProto.FLOAT


def test_declared_ranks():
    _, model = residual()
    graph = OnnxGraph(model)
    assert (graph.rank("x"), graph.rank("fc.w"), graph.rank("flat_out"), graph.rank("nowhere")) == (4, 2, 2, None)


def test_a_removed_node_leaves_its_place_to_another():
    net, model = residual()
    graph = OnnxGraph(model)
    relu = graph.node("node_stem_relu")
    graph.remove_node(relu)
    assert graph.producer("stem_relu_out") is None
    assert graph.consumers("stem_out") == ()
    graph.add_node("Relu", "node_stem_relu", ["stem_out"], ["stem_relu_out"])
    feeds = net.data()
    np.testing.assert_array_equal(run(graph.build(), feeds)["y"], run(model, feeds)["y"])


def test_copying_fields_leaves_out_what_is_skipped():
    _, model = residual()
    copy = onnx.ModelProto()
    copy_fields(model, copy, skip={"graph"})
    copy_fields(model.graph, copy.graph, skip={"initializer"})
    assert not copy.graph.initializer
    copy.graph.initializer.extend(model.graph.initializer)
    assert copy == model
