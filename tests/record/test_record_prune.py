"""Pruning in records: attributes of every type, node types of every framework, masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import RecordError, RecordParseError
from amct.record import (
    PruneNode,
    PruneRecord,
    Record,
    encode_record,
    format_record,
    parse_record,
    read_record,
)
from amct.record.prune import Attribute, onnx_type, pack_mask, unpack_mask

ATTRIBUTES = (
    Attribute(name="undefined", type="UNDEFINED", value=None),
    Attribute(name="f", type="FLOAT", value=0.1),
    Attribute(name="i", type="INT", value=-(2**63)),
    Attribute(name="s", type="STRING", value='quote " and \n and ä'),
    Attribute(name="raw", type="STRING", value=b"\xff\x00".decode("utf-8", "surrogateescape")),
    Attribute(name="floats", type="FLOATS", value=(1.5, 2**-149, 3.4028235e38)),
    Attribute(name="ints", type="INTS", value=(0, 2**63 - 1)),
    Attribute(name="strings", type="STRINGS", value=("a", "")),
    Attribute(name="empty", type="INTS", value=()),
)


def test_attributes_of_every_type_survive_both_forms():
    node = PruneNode(name="n", attributes=ATTRIBUTES)
    record = Record(prune=(PruneRecord(producers=(node,), selective=node),))
    assert parse_record(format_record(record)) == record
    assert parse_record(encode_record(record, "binary")) == record
    assert node.get("floats") == (1.5, 2**-149, float(np.float32(3.4028235e38)))
    assert node.get("nothing") is None


def test_the_last_of_two_attributes_of_one_name_counts():
    node = PruneNode(name="n", attributes=(Attribute.of("begin", 1), Attribute.of("begin", 2)))
    assert node.begin == 2


def test_an_attribute_without_a_type_has_the_type_of_its_value():
    text = 'prune_record { producer { name: "n" attr { name: "a" ints: 1 ints: 2 } attr { name: "b" } } }'
    (node,) = parse_record(text).prune[0].producers
    assert node.attributes == (
        Attribute(name="a", type="INTS", value=(1, 2)),
        Attribute(name="b", type="UNDEFINED", value=None),
    )


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("type: INT ints: 1", 'node "n": attribute "a" is of type INT but has ints'),
        ("type: INT", 'attribute "a" is of type INT but has no value'),
        ("type: UNDEFINED i: 1", 'attribute "a" is of type UNDEFINED but has i'),
        ("type: INTS ints: 1 f: 2", 'attribute "a" is of type INTS but has f and ints'),
    ],
)
def test_attributes_that_are_not_what_they_say(attribute, message):
    text = f'\nprune_record {{ consumer {{ name: "n" attr {{ name: "a" {attribute} }} }} }}'
    with pytest.raises(RecordParseError, match=f"r:2:1: .*{message}"):
        parse_record(text, "r")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("INT", 1.5), ("INT", True), ("INTS", 3), ("STRING", 3), ("FLOATS", ("a",)), ("UNDEFINED", 0), ("FLOAT", (1.0,))],
)
def test_attributes_that_cannot_be_built(kind, value):
    with pytest.raises(RecordError, match=f'attribute "a": expected a value of type {kind}, got '):
        Attribute(name="a", type=kind, value=value)


def test_an_attribute_that_does_not_fit_64_bits_cannot_be_written():
    node = PruneNode(name="n", attributes=(Attribute.of("begin", 2**63),))
    with pytest.raises(RecordError, match='node "n", attribute "begin": '):
        format_record(Record(prune=(PruneRecord(producers=(node,)),)))


@pytest.mark.parametrize(
    ("names", "onnx"),
    [
        (("Conv", "Conv2d", "Conv1d", "Conv2D", "DepthwiseConv2dNative"), "Conv"),
        (("ConvTranspose", "ConvTranspose2d", "Conv2DBackpropInput"), "ConvTranspose"),
        (("Gemm", "Linear"), "Gemm"),
        (("MatMul",), "MatMul"),
        (("BatchNormalization", "BatchNorm2d", "FusedBatchNormV3", "FusedBatchNorm"), "BatchNormalization"),
        (("SomethingOfTheirOwn",), "SomethingOfTheirOwn"),
    ],
)
def test_node_types_of_every_framework(names, onnx):
    for name in names:
        assert onnx_type(name) == onnx
        text = f'prune_record {{ producer {{ name: "n" attr {{ name: "type" type: STRING s: "{name}" }} }} }}'
        record = parse_record(text)
        assert record.prune[0].node("n").kind == onnx
        assert f's: "{onnx}"' in format_record(record)


def test_a_node_of_a_chain():
    node = PruneNode.channels("conv", "Conv2d", 8, 24, (9, 11), group=2, prune_group=4)
    assert [(attribute.name, attribute.value) for attribute in node.attributes] == [
        ("type", "Conv"),
        ("begin", 8),
        ("end", 24),
        ("group", 2),
        ("prune_group", 4),
        ("prune_index", (9, 11)),
    ]
    assert (node.kind, node.begin, node.end, node.prune_index) == ("Conv", 8, 24, (9, 11))
    bare = PruneNode(name="bare")
    assert (bare.kind, bare.begin, bare.end, bare.prune_index, bare.mask()) == (None, None, None, (), None)
    chain = PruneRecord(producers=(node,), consumers=(bare,))
    assert chain.nodes == (node, bare)
    with pytest.raises(RecordError, match=r'no node "conf".*"conv"'):
        chain.node("conf")


# ------------------------------------------------------------------------------------------------------------ masks


def packed_by_hand(bits: list[int]) -> list[int]:
    """The packing in plain arithmetic: bit k is bit 7 - k % 8 of byte k // 8; eight bytes, lowest first, a number."""
    numbers = []
    for start in range(0, len(bits), 64):
        number = 0
        for offset, bit in enumerate(bits[start : start + 64]):
            number += bit << (8 * (offset // 8) + 7 - offset % 8)
        numbers.append(number - 2**64 if number >= 2**63 else number)
    return numbers


@given(st.lists(st.integers(0, 1), max_size=400))
def test_masks_are_packed_as_the_formula_says_and_come_back(bits):
    mask = np.array(bits, dtype=np.int64)
    numbers = pack_mask(mask)
    assert list(numbers) == packed_by_hand(bits)
    assert unpack_mask(numbers, (len(bits),)).tolist() == [bool(bit) for bit in bits]


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.float32])
def test_masks_of_any_shape_and_number_type(kind):
    mask = np.arange(2 * 3 * 5).reshape(2, 3, 5) % 3 == 0
    node = PruneNode.masked("conv", mask.astype(kind))
    assert node.mask_shape == (2, 3, 5)
    np.testing.assert_array_equal(node.mask(), mask)


def test_the_masks_of_the_reference_keep_two_of_four(golden):
    record = read_record(golden / "amct" / "sparse_42" / "record.txt")
    assert len(record.prune) == 6
    for chain in record.prune:
        node = chain.selective
        assert node is not None
        mask = node.mask()
        assert mask is not None
        assert PruneNode.masked(node.name, mask) == node
        channels = np.moveaxis(mask, 1, -1)
        if channels.shape[-1] <= 2:
            assert channels.all()  # nothing to choose from
        elif channels.shape[-1] % 4 == 0:
            kept = channels.reshape(-1, 4).sum(axis=1)
            assert set(kept.tolist()) == {2}, node.name


@pytest.mark.parametrize(
    ("numbers", "shape", "message"),
    [
        ((1,), (65,), "has 65 bits, that is 2 numbers of 64; got 1"),
        ((1, 2), (8, 8), "has 64 bits, that is 1 numbers of 64; got 2"),
        ((1,), (-1, 8), "cannot have the shape"),
        ((2**63,), (8,), "does not fit 64 bits"),
    ],
)
def test_masks_that_do_not_fit_their_shape(numbers, shape, message):
    with pytest.raises(RecordError, match=message):
        unpack_mask(numbers, shape)


def test_a_node_names_itself_when_its_mask_does_not_fit():
    node = PruneNode(name="conv", attributes=(Attribute.of("mask_shape", (65,)), Attribute.of("selective_mask", (1,))))
    with pytest.raises(RecordError, match='layer "conv": a mask of shape'):
        node.mask()
