"""Laws that hold for every record, and readers that meet anything."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amct.errors import RecordParseError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    PruneNode,
    PruneRecord,
    Record,
    diff_records,
    encode_record,
    format_record,
    parse_caffe_record,
    parse_record,
    read_any_record,
    read_caffe_record,
    read_record,
)
from amct.record.prune import Attribute

floats = st.floats(width=32, allow_nan=False)
int32 = st.integers(-(2**31), 2**31 - 1)
uint32 = st.integers(0, 2**32 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
types = st.none() | st.sampled_from(["INT4", "INT8", "INT16", "anything"])


def several(items):
    return st.lists(items, max_size=4).map(tuple)


@st.composite
def pytorch_layers(draw):
    dst_type = draw(types)
    own = st.none() | st.just(dst_type) if dst_type is not None else types
    return LayerRecord(
        scale_d=draw(st.none() | floats),
        offset_d=draw(st.none() | int32),
        scale_w=draw(several(floats)),
        offset_w=draw(several(int32)),
        shift_bit=draw(several(uint32)),
        tensor_balance_factor=draw(several(floats)),
        skip_fusion=draw(st.booleans()),
        dst_type=dst_type,
        act_type=draw(own),
        wts_type=draw(own),
        fakequant_precision_mode=draw(st.none() | names),
        scale_h=draw(st.none() | floats),
        offset_h=draw(st.none() | int32),
        scale_r=draw(several(floats)),
        offset_r=draw(several(int32)),
    )


raw_text = st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
attributes = names.filter(lambda name: name != "type").flatmap(
    lambda name: st.one_of(
        st.just(Attribute(name=name, type="UNDEFINED", value=None)),
        floats.map(lambda value: Attribute(name=name, type="FLOAT", value=value)),
        int64.map(lambda value: Attribute(name=name, type="INT", value=value)),
        raw_text.map(lambda value: Attribute(name=name, type="STRING", value=value)),
        several(floats).map(lambda value: Attribute(name=name, type="FLOATS", value=value)),
        several(int64).map(lambda value: Attribute(name=name, type="INTS", value=value)),
        several(raw_text).map(lambda value: Attribute(name=name, type="STRINGS", value=value)),
    )
)
nodes = st.builds(PruneNode, name=names, attributes=several(attributes))
chains = st.builds(PruneRecord, producers=several(nodes), consumers=several(nodes), selective=st.none() | nodes)
pytorch_records = st.builds(
    Record,
    st.dictionaries(names, pytorch_layers(), max_size=3),
    st.dictionaries(names, st.builds(KvCacheRecord, scale=several(floats), offset=several(int32)), max_size=2),
    st.lists(chains, max_size=2).map(tuple),
)
inputs = st.builds(
    DataFactors,
    index=int32,
    scale=st.none() | floats,
    offset=st.none() | int32,
    channels=st.none() | uint32,
    height=st.none() | uint32,
    width=st.none() | uint32,
    num_bits=st.none() | int32,
)
caffe_layers = st.builds(
    CaffeLayerRecord,
    scale_w=several(floats),
    offset_w=several(int32),
    shift_bit=several(uint32),
    skip_fusion=st.booleans(),
    object_layer=st.none() | names,
    num_bits_w=st.none() | int32,
    record_d=st.lists(inputs, max_size=3, unique_by=lambda factors: factors.index).map(tuple),
)
caffe_records = st.dictionaries(names, caffe_layers, max_size=3).map(CaffeRecord)


@given(pytorch_records)
def test_every_pytorch_record_survives_both_forms(record):
    assert parse_record(format_record(record)) == record
    assert parse_record(encode_record(record, "binary")) == record
    assert format_record(parse_record(format_record(record))) == format_record(record)


@given(caffe_records)
def test_every_caffe_record_survives_both_forms(record):
    assert parse_caffe_record(format_record(record)) == record
    assert parse_caffe_record(encode_record(record, "binary")) == record


@given(st.sampled_from([pytorch_records, caffe_records]).flatmap(lambda kind: st.tuples(kind, kind)))
def test_records_differ_unless_they_are_equal(pair):
    first, second = pair
    assert diff_records(first, first) == ()
    assert bool(diff_records(first, second)) == (first != second)


# ---------------------------------------------------------------------------------------------- anything at all

SAMPLE = format_record(
    Record(
        {"conv": LayerRecord(scale_d=0.1, offset_d=-3, scale_w=(0.5, 0.25), act_type="INT8")},
        {"k": KvCacheRecord(scale=(0.5,), offset=(1,))},
        (PruneRecord(producers=(PruneNode.channels("conv", "Conv2d", 0, 8, (1, 2)),)),),
    )
)
CAFFE_SAMPLE = format_record(
    CaffeRecord({"conv": CaffeLayerRecord(scale_w=(0.5,), num_bits_w=8, record_d=(DataFactors(scale=0.1, offset=3),))})
)
ODD_WORDS = ("1e999", "nan", "-inf", "#", "\n", "'", '"', "[", "]")
WORDS = [*re.findall(r'\w+|[^\w\s]|"[^"]*"', SAMPLE + CAFFE_SAMPLE), *ODD_WORDS]
READERS = [parse_record, parse_caffe_record]


def read_or_refuse(content):
    for reader in READERS:
        try:
            record = reader(content)
        except RecordParseError:
            continue
        format_record(record)  # whatever was read can be written


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data):
    read_or_refuse(data)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    read_or_refuse(text)


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
def test_any_words_of_a_record_are_read_or_refused(text):
    read_or_refuse(text)


@given(st.sampled_from([SAMPLE, CAFFE_SAMPLE]), st.data())
def test_cut_and_damaged_text_is_read_or_refused(sample, data):
    start = data.draw(st.integers(0, len(sample)))
    end = data.draw(st.integers(start, len(sample)))
    read_or_refuse(sample[:start])
    read_or_refuse(sample[:start] + data.draw(st.text(max_size=5)) + sample[end:])


@given(st.booleans(), st.data())
def test_cut_and_damaged_binary_is_read_or_refused(is_caffe, data):
    whole = encode_record(parse_caffe_record(CAFFE_SAMPLE) if is_caffe else parse_record(SAMPLE), "binary")
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    read_or_refuse(whole[:start])
    read_or_refuse(whole[:start] + data.draw(st.binary(max_size=5)) + whole[end:])


@pytest.mark.parametrize("suffix", [".txt", ".bin", ""])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"])
def test_wrong_encodings_are_refused_in_files_of_any_name(tmp_path, suffix, encoding):
    file = tmp_path / f"record{suffix}"
    file.write_bytes(SAMPLE.replace("conv", "cönv").encode(encoding))
    readable = encoding == "utf-8-sig" and suffix != ".bin"
    for reader in (read_record, read_any_record):
        if readable:
            assert "cönv" in reader(file)
        else:
            with pytest.raises(RecordParseError, match=re.escape(str(file))):
                reader(file)
    with pytest.raises(RecordParseError, match=re.escape(str(file))):
        read_caffe_record(file)


def test_deep_nesting_and_huge_numbers_are_refused():
    for text in (
        "record {" * 10_000,
        "record { value { " + "x { " * 10_000 + "}" * 10_000,
        'record { key: "a" value { offset_d: ' + "9" * 100_000 + " } }",
        'record { key: "a" value { scale_d: 1e999 } }',
        'record { key: "a" value { shift_bit: -1 } }',
    ):
        for reader in READERS:
            with pytest.raises(RecordParseError, match="<record>:1:"):
                reader(text)


def test_nan_and_infinity_are_read_and_written():
    record = parse_record('record { key: "a" value { scale_d: nan scale_w: inf scale_w: -inf } }')
    assert "scale_d: nan" in format_record(record)
    assert record["a"].scale_w == (float("inf"), float("-inf"))
