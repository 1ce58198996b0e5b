"""The graph of the network: boxes from ONNX, a layout without overlaps, lines that run downwards."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from onnx import TensorProto, helper

from amct.report.network import BOX_HEIGHT, BOX_WIDTH, Box, Network, drawing, layout, merged_chains, onnx_network


@some.composite
def networks(draw):
    inputs = []
    for place in range(draw(some.integers(1, 25))):
        sources = draw(some.lists(some.integers(0, place - 1), max_size=3, unique=True)) if place else []
        inputs.append(tuple(sources))
    return inputs


@given(networks())
@settings(max_examples=60, deadline=None)
def test_boxes_do_not_overlap_and_lines_run_down_inside_the_picture(inputs):
    placed = layout(inputs)
    for index, (x, y) in enumerate(placed.boxes):
        assert x >= 0
        assert x + BOX_WIDTH <= placed.width
        assert y + BOX_HEIGHT <= placed.height
        for other_x, other_y in placed.boxes[index + 1 :]:
            assert other_y != y or abs(other_x - x) >= BOX_WIDTH
    assert set(placed.lines) == {(source, target) for target, sources in enumerate(inputs) for source in sources}
    for (source, target), points in placed.lines.items():
        assert points[0] == pytest.approx(
            (placed.boxes[source][0] + BOX_WIDTH / 2, placed.boxes[source][1] + BOX_HEIGHT)
        )
        assert points[-1] == pytest.approx((placed.boxes[target][0] + BOX_WIDTH / 2, placed.boxes[target][1]))
        assert all(upper[1] < lower[1] for upper, lower in pairwise(points))


def test_a_chain_is_one_column_and_branches_stand_side_by_side():
    placed = layout([(), (0,), (1,), (1,), (2, 3), (4,)])
    columns = [x for x, _ in placed.boxes]
    assert columns[0] == columns[1] == columns[4] == columns[5]
    assert columns[2] != columns[3]
    assert (columns[2] + columns[3]) / 2 == pytest.approx(columns[1])


def test_a_thousand_layers_with_long_skips_are_placed():
    inputs = [() if place == 0 else (place - 1, *([place - 40] if place % 40 == 0 else [])) for place in range(1000)]
    placed = layout(inputs)
    assert placed.height > 1000 * BOX_HEIGHT
    assert placed.width < 5 * BOX_WIDTH


def test_cheap_operations_are_part_of_the_box_before_unless_somebody_else_reads_it():
    boxes = [
        Box(name="x", type="input"),
        Box(name="a", type="Conv", inputs=(0,), layer="a"),
        Box(name="r", type="Relu", inputs=(1,)),
        Box(name="b", type="Conv", inputs=(2,), layer="b"),
        Box(name="s", type="Relu", inputs=(3,)),
        Box(name="sum", type="Add", inputs=(3, 4)),
    ]
    network = merged_chains(boxes, frozenset({"Relu", "Add"}))
    assert [(box.name, box.inputs, box.merged) for box in network.boxes] == [
        ("x", (), ()),
        ("a", (0,), ("Relu",)),
        ("b", (1,), ()),
        ("s", (2,), ()),
        ("sum", (2, 3), ()),
    ]


def test_an_onnx_model_with_constants_and_integer_tensors():
    nodes = [
        helper.make_node("Constant", [], ["k"], value_float=2.0),
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Mul", ["r", "k"], ["m"], name="twice"),
        helper.make_node("MaxPool", ["m"], ["p"], name="pool", kernel_shape=[2]),
        helper.make_node("Conv", ["p", "w"], ["d"], name="conv@1"),
        helper.make_node("Add", ["p", "d"], ["y"], name="sum"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)], []
    )
    network = onnx_network(helper.make_model(graph), {"conv"}, {"p"})
    assert [(box.name, box.layer, box.integer, box.merged) for box in network.boxes] == [
        ("x", None, False, ()),
        ("conv", "conv", True, ("Relu", "Mul")),
        ("pool", None, True, ()),
        ("conv@1", "conv", True, ()),
        ("sum", None, False, ()),
    ]
    assert [box.inputs for box in network.boxes] == [(), (0,), (1,), (2,), (2, 3)]


def test_lines_carry_the_noise_of_the_last_measured_layer():
    boxes = (
        Box(name="x", type="input"),
        Box(name="a", type="Conv", inputs=(0,), layer="a", integer=True),
        Box(name="pool", type="MaxPool", inputs=(1,)),
        Box(name="b", type="Conv", inputs=(2,), layer="b", integer=True),
    )
    drawn = drawing(Network(boxes=boxes), {"a": (0, 12.0), "b": (1, 35.0)})
    assert [line.classes for line in drawn.lines] == ["unmeasured", "q1", "q1"]
    assert [box.classes for box in drawn.boxes] == ["float unmeasured", "integer q1", "float unmeasured", "integer q3"]
    assert [box.index for box in drawn.boxes] == [None, 0, None, 1]
    assert drawn.boxes[1].title == "a\nConv\ninteger\nSQNR 12.0 dB"
    assert drawing(None, {}) is None
