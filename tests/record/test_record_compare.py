"""Two records side by side, and both in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amct.errors import ArgumentError, RecordError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    Difference,
    KvCacheRecord,
    LayerRecord,
    PruneNode,
    PruneRecord,
    Record,
    describe_difference,
    diff_records,
    format_record,
    merge_records,
    read_record,
)

CHAIN = PruneRecord(producers=(PruneNode.channels("conv", "Conv", 0, 8, (1,)),))
LEFT = Record(
    {"a": LayerRecord(scale_d=0.5, offset_d=1), "b": LayerRecord(scale_w=(1.0, 2.0), skip_fusion=True)},
    {"k": KvCacheRecord(scale=(0.5,), offset=(1,))},
    (CHAIN,),
    source="left.txt",
)


def test_equal_records_do_not_differ():
    assert diff_records(LEFT, replace(LEFT, source="other")) == ()


def test_every_kind_of_difference():
    right = Record(
        {
            "a": LayerRecord(scale_d=0.25, offset_d=1),
            "b": LayerRecord(scale_w=(1.0, 3.0), offset_w=(0, 0)),
            "c": LayerRecord(),
        },
        {"k": KvCacheRecord(scale=(0.5,), offset=(2,))},
        (PruneRecord(producers=(PruneNode.channels("conv", "Conv", 0, 8, (2, 3)),)),),
    )
    differences = diff_records(LEFT, right)
    assert differences == (
        Difference(entry="a", field="scale_d", kind="changed", left=0.5, right=0.25),
        Difference(entry="b", field="scale_w", kind="changed", left=(1.0, 2.0), right=(1.0, 3.0)),
        Difference(entry="b", field="skip_fusion", kind="changed", left=True, right=None),
        Difference(entry="b", field="offset_w", kind="changed", left=None, right=(0, 0)),
        Difference(entry="kv_cache k", field="offset", kind="changed", left=(1,), right=(2,)),
        Difference(
            entry="prune conv", field="producer[conv].prune_index", kind="changed", left=(1,), right=(2, 3)
        ),
        Difference(entry="c", field="", kind="only right"),
    )  # fmt: skip
    assert [describe_difference(difference) for difference in differences] == [
        "a: scale_d: 0.5 -> 0.25",
        "b: scale_w: [1] 2.0 -> 3.0",
        "b: skip_fusion: True -> -",
        "b: offset_w: - -> 0, 0",
        "kv_cache k: offset: [0] 1 -> 2",
        "prune conv: producer[conv].prune_index: 1 values -> 2 values",
        "c: only right",
    ]
    assert diff_records(right, LEFT)[4] == Difference(entry="c", field="", kind="only left")


def test_many_changed_values_are_counted():
    ours, theirs = (Record({"a": LayerRecord(scale_w=(1.0, value, value))}) for value in (2.0, 3.0))
    assert [describe_difference(found) for found in diff_records(ours, theirs)] == [
        "a: scale_w: [1] 2.0 -> 3.0 (and 1 more of 3)"
    ]


def test_caffe_records_differ_by_input():
    ours = CaffeRecord({"s": CaffeLayerRecord(record_d=(DataFactors(scale=0.5), DataFactors(index=1, scale=1.0)))})
    theirs = CaffeRecord({"s": CaffeLayerRecord(record_d=(DataFactors(scale=0.5), DataFactors(index=1, num_bits=8)))})
    assert diff_records(ours, theirs) == (
        Difference(entry="s", field="record_d[1].scale_d", kind="changed", left=1.0, right=None),
        Difference(entry="s", field="record_d[1].num_bits_d", kind="changed", left=None, right=8),
    )


def test_dialects_are_not_compared_nor_merged():
    for function in (diff_records, merge_records):
        with pytest.raises(ArgumentError, match="different dialects"):
            function(Record(), CaffeRecord())


def test_balance_factors_and_quantization_factors_become_one_record(golden):
    balanced = read_record(golden / "amct" / "r20_dmq" / "record_dmq.txt")
    complete = read_record(golden / "amct" / "r20_dmq" / "record.txt")
    without = Record({name: replace(entry, tensor_balance_factor=()) for name, entry in complete.items()})
    for merged in (merge_records(balanced, without), merge_records(without, balanced)):
        assert dict(merged) == dict(complete)
    assert format_record(merge_records(without, balanced)) == format_record(complete)


def test_a_record_merged_with_itself_or_with_nothing_is_itself():
    assert merge_records(LEFT, LEFT) == LEFT
    assert merge_records(LEFT, Record()) == LEFT
    assert merge_records(Record(), LEFT) == LEFT
    assert format_record(merge_records(LEFT, LEFT)) == format_record(LEFT)


def test_inputs_of_a_caffe_layer_are_merged():
    weights = CaffeRecord({"s": CaffeLayerRecord(scale_w=(1.0,), offset_w=(0,))})
    first = CaffeRecord({"s": CaffeLayerRecord(record_d=(DataFactors(index=1, scale=0.5),))})
    second = CaffeRecord({"s": CaffeLayerRecord(record_d=(DataFactors(scale=1.0), DataFactors(index=1, offset=3)))})
    merged = merge_records(merge_records(weights, first), second)
    assert merged["s"] == CaffeLayerRecord(
        scale_w=(1.0,), offset_w=(0,), record_d=(DataFactors(scale=1.0), DataFactors(index=1, scale=0.5, offset=3))
    )


def test_every_contradiction_is_named():
    right = Record(
        {"a": LayerRecord(scale_d=0.25, offset_d=2), "b": LayerRecord(scale_w=(1.0, 2.0, 3.0, 4.0))},
        {"k": KvCacheRecord(scale=(1.5,), offset=(1,))},
        (PruneRecord(producers=(PruneNode.channels("conv", "Conv", 0, 8, (2,)),)),),
    )
    with pytest.raises(RecordError, match="5 mistakes") as caught:
        merge_records(LEFT, right)
    assert [problem.message for problem in caught.value.problems] == [
        'layer "a": scale_d is 0.5 in left.txt and 0.25 in the second record',
        'layer "a": offset_d is 1 in left.txt and 2 in the second record',
        'layer "b": scale_w is (1.0, 2.0) in left.txt and (1.0, 2.0, 3.0, … 4 values) in the second record',
        'layer "kv_cache k": scale is (0.5,) in left.txt and (1.5,) in the second record',
        '"prune conv" is one chain in left.txt and another in the second record',
    ]


def test_types_that_contradict_only_together():
    ours, theirs = Record({"a": LayerRecord(dst_type="INT8")}), Record({"a": LayerRecord(wts_type="INT4")})
    with pytest.raises(RecordError, match='layer "a": dst_type INT8 means'):
        merge_records(ours, theirs)


def test_contradicting_inputs_are_named():
    ours, theirs = (CaffeRecord({"s": CaffeLayerRecord(record_d=(DataFactors(scale=value),))}) for value in (1.0, 2.0))
    with pytest.raises(RecordError, match=r'layer "s record_d\[0\]": scale is 1.0 in .* and 2.0 in'):
        merge_records(ours, theirs)
