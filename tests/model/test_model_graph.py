from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import ModelError
from amct.model import Graph, Node, Skip


def node(name: str, op: str, inputs: str = "", outputs: str = "") -> Node:
    return Node(name=name, op=op, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()))


@pytest.fixture
def diamond() -> Graph:
    nodes = [
        node("conv", "Conv2d", "x", "a"),
        node("left", "relu", "a", "b"),
        node("right", "sigmoid", "a", "c"),
        node("sum", "add", "b c", "d"),
        node("square", "mul", "d d", "e"),
    ]
    return Graph(nodes, inputs=["x"], outputs=["e"])


def test_iterates_in_the_order_given(diamond: Graph):
    assert [item.name for item in diamond] == ["conv", "left", "right", "sum", "square"]
    assert len(diamond) == 5
    assert "left" in diamond
    assert "nowhere" not in diamond


def test_neighbours(diamond: Graph):
    assert diamond.producer("x") is None
    assert diamond.producer("a") is diamond["conv"]
    assert diamond.successors(diamond["conv"]) == (diamond["left"], diamond["right"])
    assert diamond.predecessors(diamond["sum"]) == (diamond["left"], diamond["right"])
    assert diamond.predecessors(diamond["conv"]) == ()


def test_a_tensor_read_twice_by_one_node_has_one_consumer(diamond: Graph):
    assert diamond.consumers("d") == (diamond["square"],)
    assert diamond.predecessors(diamond["square"]) == (diamond["sum"],)


def test_sole_consumer(diamond: Graph):
    assert diamond.sole_consumer(diamond["left"]) is diamond["sum"]
    assert diamond.sole_consumer(diamond["conv"]) is None  # two readers
    assert diamond.sole_consumer(diamond["square"]) is None  # a graph output


def test_a_graph_output_has_no_sole_consumer():
    graph = Graph([node("a", "relu", "x", "y"), node("b", "relu", "y", "z")], inputs=["x"], outputs=["y", "z"])
    assert graph.sole_consumer(graph["a"]) is None


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ([("a", "relu", "x", "y"), ("a", "relu", "y", "z")], [], 'two nodes are named "a"'),
        ([("a", "relu", "y", "z")], [], '"a" reads "y", which nothing before it makes'),
        ([("a", "relu", "x", "x")], [], '"a" makes "x", which exists already'),
        ([("a", "relu", "x", "y")], ["z"], 'graph output "z" is made by no node'),
    ],
    ids=["same name", "not yet made", "made twice", "unmade output"],
)
def test_a_graph_that_cannot_be_is_refused(nodes, outputs, message):
    with pytest.raises(ModelError, match=message):
        Graph([node(*item) for item in nodes], inputs=["x"], outputs=outputs)


def test_an_unknown_name_is_answered_with_the_nearest(diamond: Graph):
    with pytest.raises(ModelError, match=r'no node is named "rigth"\. Did you mean "right"\?'):
        diamond["rigth"]


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=15))
def test_predecessors_and_successors_agree(reads: list[list[int]]):
    # Node i makes tensor i and reads earlier tensors only; -1 is the graph's input.
    nodes = [
        Node(
            name=f"n{index}",
            op="op",
            inputs=tuple(f"t{wanted % (index + 1) - 1}" for wanted in wanted_tensors),
            outputs=(f"t{index}",),
        )
        for index, wanted_tensors in enumerate(reads)
    ]
    graph = Graph(nodes, inputs=["t-1"])
    forward = {(a.name, b.name) for a in graph for b in graph.successors(a)}
    backward = {(a.name, b.name) for b in graph for a in graph.predecessors(b)}
    assert forward == backward


def test_skip_reads_as_a_sentence():
    assert str(Skip("conv1", "called twice")) == '"conv1": called twice'
