from __future__ import annotations

import re

import pytest

from amct.model import FusionPattern, Graph, Node, find_fusions, find_leading_fusions

TORCH = FusionPattern(heads=frozenset({"Conv2d"}), stages=(frozenset({"BatchNorm2d"}),))
CAFFE = FusionPattern(
    heads=frozenset({"Convolution"}),
    stages=(frozenset({"BatchNorm"}), frozenset({"Scale"}), frozenset({"Bias"})),
)


def chain(*ops: str, outputs: tuple[int, ...] = (-1,)) -> Graph:
    """Nodes n0, n1, ... in a row, each with the op given; tensors t0, t1, ..."""
    nodes = [
        Node(name=f"n{i}", op=op, inputs=(f"t{i - 1}" if i else "x",), outputs=(f"t{i}",)) for i, op in enumerate(ops)
    ]
    return Graph(nodes, inputs=["x"], outputs=[f"t{range(len(ops))[i]}" for i in outputs])


def names(fusions) -> list[tuple[str, list[str]]]:
    return [(fusion.head.name, [node.name for node in fusion.folded]) for fusion in fusions]


@pytest.mark.parametrize(
    ("ops", "folded"),
    [
        (["Convolution", "BatchNorm", "Scale", "Bias", "ReLU"], ["n1", "n2", "n3"]),
        (["Convolution", "BatchNorm", "Scale"], ["n1", "n2"]),
        (["Convolution", "Scale"], ["n1"]),
        (["Convolution", "BatchNorm", "Bias"], ["n1", "n2"]),
        (["Convolution", "Scale", "BatchNorm"], ["n1"]),  # out of order: the second stays
        (["Convolution", "BatchNorm", "BatchNorm"], ["n1"]),
    ],
    ids="-".join,
)
def test_stages_fold_in_order(ops: list[str], folded: list[str]):
    fusions, skips = find_fusions(chain(*ops), CAFFE)
    assert names(fusions) == [("n0", folded)]
    left = [f"n{i}" for i, op in enumerate(ops) if op in CAFFE.foldable and f"n{i}" not in folded]
    assert [skip.layer for skip in skips] == left


def test_the_reason_for_a_stage_out_of_order_is_told():
    _, skips = find_fusions(chain("Convolution", "Scale", "BatchNorm"), CAFFE)
    assert [str(skip) for skip in skips] == ['"n2": not folded into "n1": out of the order in which layers are folded']


def test_other_readers_prevent_folding():
    nodes = [
        Node(name="conv", op="Conv2d", inputs=("x",), outputs=("a",)),
        Node(name="bn", op="BatchNorm2d", inputs=("a",), outputs=("b",)),
        Node(name="sum", op="add", inputs=("a", "b"), outputs=("c",)),
    ]
    fusions, skips = find_fusions(Graph(nodes, inputs=["x"], outputs=["c"]), TORCH)
    assert fusions == ()
    assert [str(skip) for skip in skips] == ['"bn": not folded into "conv": "sum" reads the same tensor']


def test_a_returned_tensor_prevents_folding():
    fusions, skips = find_fusions(chain("Conv2d", "BatchNorm2d", outputs=(0, 1)), TORCH)
    assert fusions == ()
    assert skips[0].reason == 'not folded into "n0": the model also returns what "n0" makes'


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (["BatchNorm2d"], "it reads an input of the model"),
        (["relu", "BatchNorm2d"], r'it follows "n0" \(relu\), which cannot take it'),
    ],
)
def test_a_node_with_no_head_is_told(ops: list[str], reason: str):
    fusions, skips = find_fusions(chain(*ops), TORCH)
    assert fusions == ()
    (skip,) = skips
    assert re.search(reason, skip.reason)


@pytest.mark.parametrize("listed", ["n0", "n1"])
def test_the_user_can_leave_a_layer_alone(listed: str):
    fusions, skips = find_fusions(chain("Conv2d", "BatchNorm2d"), TORCH, skip=[listed])
    assert fusions == ()
    assert skips[0].layer == "n1"
    assert skips[0].reason == f'not folded into "n0": "{listed}" is listed in skip_fusion_layers'


def test_a_refusal_keeps_what_was_folded_before_it():
    fusions, skips = find_fusions(
        chain("Convolution", "BatchNorm", "Scale", "Bias"),
        CAFFE,
        refuse=lambda head, candidate: f"{head.op} dislikes {candidate.op}" if candidate.op == "Scale" else None,
    )
    assert names(fusions) == [("n0", ["n1"])]
    assert skips[0].reason == 'not folded into "n0": Convolution dislikes Scale'
    assert skips[1].layer == "n3"


def test_leading():
    fusions, skips = find_leading_fusions(chain("ReLU", "BatchNorm", "Scale", "Convolution"), CAFFE)
    assert names(fusions) == [("n3", ["n1", "n2"])]
    assert skips == ()


def test_leading_refused():
    fusions, skips = find_leading_fusions(
        chain("BatchNorm", "Scale", "Convolution"), CAFFE, refuse=lambda head, _: f"{head.name} is padded"
    )
    assert fusions == ()
    assert [str(skip) for skip in skips] == ['"n1": not folded into "n2": n2 is padded']


def test_leading_needs_a_sole_reader():
    nodes = [
        Node(name="bn", op="BatchNorm", inputs=("x",), outputs=("a",)),
        Node(name="conv", op="Convolution", inputs=("a",), outputs=("b",)),
        Node(name="other", op="ReLU", inputs=("a",), outputs=("c",)),
    ]
    assert find_leading_fusions(Graph(nodes, inputs=["x"], outputs=["b", "c"]), CAFFE) == ((), ())
