"""Every record of the reference and every sample of the documents, read and written again."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from amct.errors import FileError, ParseError, Position, RecordError, RecordParseError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    PruneNode,
    Record,
    encode_record,
    format_record,
    parse_caffe_record,
    parse_record,
    read_any_record,
    read_caffe_record,
    read_record,
    write_record,
)


def f32(text: str) -> float:
    """What a float field holds: the nearest float32."""
    return float(np.float32(text))


# ------------------------------------------------------------------------------------------------ the reference's files


def test_every_record_of_the_reference_is_read_and_written_byte_for_byte(golden):
    files = sorted(golden.glob("amct/*/record*.txt"))
    assert len(files) == 58
    assert len({file.parent.name for file in files if file.name == "record.txt"}) == 54
    for file in files:
        content = file.read_bytes()
        record = read_record(file)
        assert format_record(record).encode() == content, file
        assert record.warnings == (), file
        assert parse_record(encode_record(record, "binary")) == record, file


def test_factors_of_the_reference_are_exact(golden):
    record = read_record(golden / "amct" / "small_lstm_bf_hx" / "record.txt")
    assert list(record) == ["rnn", "fc"]
    rnn = record["rnn"]
    assert (rnn.scale_d, rnn.offset_d) == (f32("0.021237116"), -8)
    assert (rnn.scale_h, rnn.offset_h) == (f32("0.017677413"), 22)
    assert len(rnn.scale_w) == len(rnn.offset_w) == len(rnn.scale_r) == len(rnn.offset_r) == 48
    assert rnn.scale_w[:2] == (f32("0.0021231985"), f32("0.0008788827"))
    assert set(rnn.offset_w + rnn.offset_r) == {0}
    assert record.where("rnn") == Position(record.source, 1, 1)
    assert record.where("rnn", "offset_d") == Position(record.source, 5, 5)
    assert record.where("nowhere") is None


def test_the_kv_cache_of_the_reference(golden):
    record = read_record(golden / "amct" / "kv_ifmr_pc" / "record.txt")
    assert list(record) == []
    assert record.names == ("k", "v")
    assert record.kv_cache["v"] == KvCacheRecord(scale=(f32("0.012488055"),), offset=(0,))
    assert len(record.kv_cache["k"].scale) == len(record.kv_cache["k"].offset) == 8


def test_the_chains_of_the_reference(golden):
    record = read_record(golden / "amct" / "prune_03_plain" / "record.txt")
    assert [[node.name for node in chain.nodes] for chain in record.prune] == [
        ["c1", "b1", "c2"],
        ["c2", "b2", "c3"],
        ["fc1", "fc"],
    ]
    producer = record.prune[0].node("c1")
    assert (producer.kind, producer.begin, producer.end) == ("Conv", 0, 16)
    assert len(producer.prune_index) == 5
    assert all(chain.producers[0].prune_index == chain.consumers[-1].prune_index for chain in record.prune)


# --------------------------------------------------------------------------------------------- the documents' samples


def test_the_documents_quantized_sample(golden):
    file = golden / "record" / "pytorch_quantized.txt"
    record = read_record(file)
    assert dict(record) == {
        "conv1": LayerRecord(
            scale_d=0.0798481479,
            offset_d=1,
            scale_w=(0.00297622895,),
            offset_w=(0,),
            skip_fusion=True,
            dst_type="INT8",
        ),
        "layer1.0.conv1": LayerRecord(
            scale_d=0.00392156886,
            offset_d=-128,
            scale_w=(0.00106807391, 0.00104224426),
            offset_w=(0, 0),
            dst_type="INT4",
        ),
    }
    four_bits = record["layer1.0.conv1"]
    assert four_bits.skip_fusion is False
    assert (four_bits.activation_type, four_bits.weight_type) == ("INT4", "INT4")
    # The samples have nine digits; we write as few as give the same float32, so only the digits differ.
    written = format_record(record)
    assert parse_record(written) == record
    assert [line.split(":")[0] for line in written.splitlines()] == [
        line.split(":")[0] for line in file.read_text().splitlines()
    ]


def test_the_documents_balanced_sample(golden):
    record = read_record(golden / "record" / "pytorch_balanced.txt")
    assert list(record) == ["linear_1", "conv_1"]
    assert record["conv_1"] == LayerRecord(
        scale_d=0.00759239076,
        offset_d=-4,
        scale_w=(0.0075149606,),
        offset_w=(0,),
        tensor_balance_factor=(1.04744744, 1.44586647),
    )
    assert (record["conv_1"].activation_type, record["conv_1"].weight_type) == ("INT8", "INT8")
    assert parse_record(format_record(record)) == record


def test_the_documents_channel_pruned_sample_is_written_with_onnx_types(golden):
    file = golden / "record" / "pytorch_channel_pruned.txt"
    record = read_record(file)
    (chain,) = record.prune
    assert chain.producers == (PruneNode.channels("conv1", "Conv2d", 0, 64),)
    assert chain.consumers == (PruneNode.channels("BN_1", "FusedBatchNormV3", 0, 64),)
    assert (chain.node("conv1").kind, chain.node("BN_1").kind) == ("Conv", "BatchNormalization")
    expected = file.read_text().replace('"Conv2d"', '"Conv"').replace('"FusedBatchNormV3"', '"BatchNormalization"')
    assert format_record(record) == expected


def test_the_documents_selective_sample(golden):
    file = golden / "record" / "pytorch_selective_pruned.txt"
    record = read_record(file)
    (chain,) = record.prune
    assert chain.selective is not None
    assert chain.selective.mask_shape == (3, 3, 3, 32)
    assert chain.selective.mask() is None
    assert format_record(record) == file.read_text()


def test_the_guides_sample_lacks_a_brace(golden):
    with pytest.raises(RecordParseError, match='is a "}" missing before it') as caught:
        read_caffe_record(golden / "record" / "caffe_guide.txt")
    position = caught.value.position
    assert position is not None
    assert (position.line, position.column) == (21, 3)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ParseError)


def test_the_guides_sample_with_its_brace(golden):
    text = (golden / "record" / "caffe_guide.txt").read_text().replace("} record {", "}\n}\nrecord {")
    record = parse_caffe_record(text, "guide")
    assert dict(record) == {
        "conv1": CaffeLayerRecord(
            scale_w=(0.43213, 0.78163, 1.03213),
            offset_w=(0, 0, 0),
            shift_bit=(1, 1, 1),
            num_bits_w=8,
            record_d=(DataFactors(index=0, scale=1.554879, offset=-49, num_bits=8),),
        ),
        "pool1": CaffeLayerRecord(
            scale_w=(1.0,),
            offset_w=(0,),
            record_d=(DataFactors(index=0, scale=0.051592775, offset=-128, num_bits=8),),
        ),
        "fc1000": CaffeLayerRecord(
            scale_w=(0.0057898927,),
            offset_w=(0,),
            shift_bit=(2,),
            num_bits_w=8,
            record_d=(DataFactors(index=0, scale=0.031852875, offset=-128, num_bits=8),),
        ),
    }
    assert [str(warning) for warning in record.warnings] == [
        'guide:4:9: layer "conv1": scale_d, offset_d outside record_d are ignored: record_d has input 0',
        'guide:14:9: layer "conv1": shift_bit is not used and has no effect',
        'guide:41:5: layer "fc1000": shift_bit is not used and has no effect',
    ]
    # The second and third entries are in our own layout: they come back as the guide prints them.
    second = 'record {\n  key: "pool1"'
    written = format_record(record)
    assert written[written.index(second) :] == text[text.index(second) :]


# -------------------------------------------------------------------------------------------------- the old dialects


def test_factors_directly_in_value_are_those_of_input_0():
    record = parse_caffe_record(
        'record { key: "c" value { scale_d: 0.5 offset_d: -3 channels: 3 height: 4 width: 5 scale_w: 1 offset_w: 0 } }'
    )
    assert record["c"].record_d == (DataFactors(index=0, scale=0.5, offset=-3, channels=3, height=4, width=5),)
    assert record.warnings == ()
    assert "  value {\n    scale_w: 1.0\n    offset_w: 0\n    record_d {\n      scale_d: 0.5\n" in format_record(record)


def test_factors_directly_in_value_stand_beside_other_inputs():
    record = parse_caffe_record(
        'record { key: "c" value { scale_d: 0.5 offset_d: 1 record_d { index: 1 scale_d: 2 offset_d: 3 } } }'
    )
    assert [factors.index for factors in record["c"].record_d] == [0, 1]


def test_dst_type_overrides_contradicting_types_with_a_note():
    record = parse_record(
        'record { key: "c" value { dst_type: "INT4" act_type: "INT16" wts_type: "INT4" scale_d: 1 offset_d: 0 } }', "r"
    )
    assert record["c"].activation_type == record["c"].act_type == "INT4"
    assert [str(note) for note in record.warnings] == [
        'r:1:44: layer "c": dst_type INT4 overrides act_type INT16',
    ]


def test_a_contradicting_dst_type_cannot_be_built():
    with pytest.raises(RecordError, match=r"dst_type INT8 means .* but wts_type is INT4; leave dst_type out"):
        LayerRecord(dst_type="INT8", act_type="INT8", wts_type="INT4")


@pytest.mark.parametrize(
    ("act", "wts", "written"), [("INT8", "INT8", "INT8"), ("INT4", "INT4", "INT4"), ("INT8", "INT4", None)]
)
def test_retraining_writes_dst_type_only_where_both_types_are_equal(act, wts, written):
    entry = LayerRecord(scale_d=1.0, offset_d=0, act_type=act, wts_type=wts)
    assert "dst_type" not in format_record(Record({"c": entry}))
    retrained = entry.for_retraining()
    assert retrained.dst_type == written
    assert (f'dst_type: "{written}"' in format_record(Record({"c": retrained}))) == (written is not None)


def test_the_last_entry_of_a_layer_given_twice_counts_with_a_note():
    text = 'record { key: "a" value { offset_d: 1 } }\nrecord { key: "b" value { offset_d: 2 } }\n'
    record = parse_record(text + 'record { key: "a" value { offset_d: 3 } }', "r")
    assert [(name, entry.offset_d) for name, entry in record.items()] == [("a", 3), ("b", 2)]
    assert [str(note) for note in record.warnings] == ['r:3:1: layer "a" is given again; the last entry is used']


def test_the_last_of_a_repeated_scalar_counts_with_a_note():
    record = parse_record('record { key: "a" value { offset_d: 1\noffset_d: 5 } }', "r")
    assert record["a"].offset_d == 5
    assert record.warnings[0].position == Position("r", 2, 1)


def test_a_layer_may_have_factors_and_a_kv_cache_entry():
    text = (
        'record {\n  key: "k"\n  kv_cache_value {\n    scale: 0.5\n    offset: 1\n  }\n}\n'
        'record {\n  key: "c"\n  value {\n    scale_d: 0.25\n    offset_d: 2\n  }\n'
        "  kv_cache_value {\n    scale: 0.125\n    offset: 3\n  }\n}\n"
    )
    record = parse_record(text)
    assert list(record) == ["c"]
    assert record.names == ("k", "c")
    assert format_record(record) == text


# ----------------------------------------------------------------------------------------------------- containers


def test_a_record_is_a_mapping():
    record = Record({"conv1": LayerRecord(offset_d=1), "fc": LayerRecord(offset_d=2)})
    assert list(record) == ["conv1", "fc"]
    assert len(record) == 2
    assert record.get("no") is None
    assert "fc" in record
    with pytest.raises(KeyError, match=r'no layer \\"convl\\".*\\"conv1\\"|no layer "convl".*"conv1"'):
        record["convl"]
    more = record.with_layers({"conv1": LayerRecord(offset_d=7), "new": LayerRecord()})
    assert list(more) == ["conv1", "fc", "new"]
    assert more["conv1"].offset_d == 7
    assert record["conv1"].offset_d == 1
    assert Record().is_empty
    assert not record.is_empty
    assert CaffeRecord().is_empty


def test_a_caffe_entry_takes_the_factors_of_one_input():
    entry = CaffeLayerRecord(scale_w=(1.0,), offset_w=(0,))
    entry = entry.with_input(DataFactors(index=1, scale=2.0)).with_input(DataFactors(index=0, scale=1.0))
    entry = entry.with_input(DataFactors(index=1, scale=3.0))
    assert [(factors.index, factors.scale) for factors in entry.record_d] == [(0, 1.0), (1, 3.0)]
    assert entry.input(1) == DataFactors(index=1, scale=3.0)
    assert entry.input(2) is None
    assert (entry.weight_bits, entry.record_d[0].bits) == (8, 8)
    with pytest.raises(RecordError, match=r"two entries for one input; the indices are \[0, 0\]"):
        replace(entry, record_d=(DataFactors(), DataFactors()))


def test_factors_are_float32_whatever_they_are_built_from():
    entry = LayerRecord(scale_d=0.1, scale_w=(np.float64(0.2), 1, np.float32(0.3)))  # type: ignore[arg-type]
    assert entry.scale_d == struct.unpack("<f", struct.pack("<f", 0.1))[0] == float(np.float32(0.1))
    assert entry.scale_w == (float(np.float32(0.2)), 1.0, float(np.float32(0.3)))
    assert math.isinf(LayerRecord(scale_d=math.inf).scale_d or 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerRecord(scale_d=1e300), r"too large for float32: 1e\+300"),
        (lambda: LayerRecord(scale_w=(1.0, -1e39)), r"too large for float32: -1e\+39"),
        (lambda: KvCacheRecord(scale=("a",)), "must be a number, got"),
    ],
)
def test_factors_that_are_no_float32(build, message):
    with pytest.raises(RecordError, match=message):
        build()


# ------------------------------------------------------------------------------------------------------------ files


def test_files_by_name_and_by_content(tmp_path):
    record = Record({"c": LayerRecord(scale_d=0.5, offset_d=1)})
    for name in ("r.txt", "r.bin", "r"):
        write_record(record, tmp_path / name)
        assert read_record(tmp_path / name) == record
    assert (tmp_path / "r").read_text() == (tmp_path / "r.txt").read_text() == format_record(record)
    assert (tmp_path / "r.bin").read_bytes() == encode_record(record, "binary")
    write_record(record, tmp_path / "other", form="binary")
    assert read_record(tmp_path / "other") == read_any_record(tmp_path / "other", dialect="pytorch") == record


def test_an_empty_file_is_an_empty_record(tmp_path):
    for name in ("r.txt", "r.bin", "r"):
        (tmp_path / name).touch()
        assert read_record(tmp_path / name).is_empty
        assert read_caffe_record(tmp_path / name).is_empty


def test_the_dialect_of_a_file(tmp_path):
    caffe = CaffeRecord({"c": CaffeLayerRecord(scale_w=(1.0,), offset_w=(0,), record_d=(DataFactors(scale=0.5),))})
    torch = Record({"c": LayerRecord(scale_d=0.5, offset_d=1, scale_w=(1.0,), offset_w=(0,), act_type="INT8")})
    for record in (caffe, torch):
        for name in ("r.txt", "r.bin"):
            write_record(record, tmp_path / name)
            assert read_any_record(tmp_path / name) == record
    write_record(Record({"c": LayerRecord(scale_d=0.5, offset_d=1)}), tmp_path / "r.bin")
    with pytest.raises(RecordParseError, match="could be a pytorch or a caffe record; choose one with dialect"):
        read_any_record(tmp_path / "r.bin")
    write_record(torch, tmp_path / "r.bin")
    with pytest.raises(RecordParseError, match="has fields that the caffe dialect does not have"):
        read_caffe_record(tmp_path / "r.bin")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record {\n  value { offset_d: 1 }\n}", r"r:1:1: record number 1 has no key"),
        ('record { key: "a" }', r"r:1:1: record number 1 has no value or kv_cache_value"),
        ('record { key: "a" value { scale_dd: 1 } }', r'r:1:27: SingleLayerRecord has no field scale_dd.*"scale_d"'),
        ('record { key: "a" value { scale_d: 1e39 } }', r"r:1:36: scale_d .*too large for float32"),
        ("prune_record { producer { } }", r"r:1:16: PruneNode needs name"),
        ("garbage", "r:1:"),
    ],
)
def test_text_that_is_no_record(text, message):
    with pytest.raises(RecordParseError, match=message):
        parse_record(text, "r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('record { key: "a" }', r"r:1:1: record number 1 has no value"),
        ("record { value { } }", r"r:1:1: record number 1 has no key"),
        ('record { key: "a" value { record_d { scale_d: 1 } } }', r"r:1:27: ActivationQuantParam needs index"),
        (
            'record { key: "a" value { record_d { index: 1 } record_d { index: 1 } } }',
            r'r:1:1: layer "a" has two record_d for one input; the indices are \[1, 1\]',
        ),
    ],
)
def test_text_that_is_no_caffe_record(text, message):
    with pytest.raises(RecordParseError, match=message):
        parse_caffe_record(text, "r")


def test_several_mistakes_are_told_together():
    with pytest.raises(RecordParseError, match="2 mistakes") as caught:
        parse_record('record { key: "a" }\nrecord { key: "b" }', "r")
    assert [problem.position.line for problem in caught.value.problems] == [1, 2]  # type: ignore[union-attr]


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "record.txt").touch()
    with pytest.raises(FileError, match=r'Did you mean "record.txt"\?'):
        read_record(tmp_path / "recrod.txt")


def test_binary_that_is_no_record(tmp_path):
    (tmp_path / "r.bin").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(RecordParseError, match="not a binary"):
        read_record(tmp_path / "r.bin")
    (tmp_path / "r.bin").write_bytes(b"\x0a\x00")
    with pytest.raises(RecordParseError, match="record number 1 has no key"):
        read_record(tmp_path / "r.bin")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Record({"c": LayerRecord(offset_d=2**31)}), 'layer "c": .*2147483648'),
        (CaffeRecord({"c": CaffeLayerRecord(shift_bit=(-1,))}), 'layer "c": .*-1'),
        (CaffeRecord({"c": CaffeLayerRecord(num_bits_w="x")}), 'layer "c": '),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_do_not_fit_their_field(record, message):
    with pytest.raises(RecordError, match=message):
        format_record(record)
