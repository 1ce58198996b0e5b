"""Two records side by side, and both in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amct.errors import ArgumentError
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


def test_dialects_are_not_compared():
    with pytest.raises(ArgumentError, match="different dialects"):
        diff_records(Record(), CaffeRecord())
