"""Agreement with protobuf's own text format: on random messages, AMCT's real records and the documents' samples."""

import struct

import google.protobuf
import pytest
from google.protobuf import text_format
from hypothesis import assume, given
from hypothesis import strategies as st

from amct.errors import ArgumentTypeError, ParseError
from amct.schema import descriptor, format_text, message_class, parse_text, read_binary
from amct.schema._fields import shortest_float, table_of

TYPES = [
    ("pytorch", "AMCTPytorchProto.AMCTConfig"),
    ("pytorch", "AMCTPytorchProto.AMCTRetrainConfig"),
    ("pytorch", "AMCTPytorchProto.ScaleOffsetRecord"),
    ("pytorch", "AMCTPytorchDistillProto.AMCTDistillConfig"),
    ("pytorch", "AMCTPytorchQuantCaliProto.AMCTQuantCaliConfig"),
    ("pytorch", "AMCTProto.AutoChannelPruneConfig"),
    ("caffe_config", "AMCTCaffeProto.AMCTConfig"),
    ("caffe_config", "AMCTCaffeProto.AMCTRetrainConfig"),
    ("caffe_config", "AMCTCaffeProto.ScaleOffsetRecord"),
    ("caffe", "caffe.SolverParameter"),
    ("caffe", "caffe.NetParameter"),
]
WRITES_READABLE_UTF8 = int(google.protobuf.__version__.split(".")[0]) >= 5  # 4.25 writes control characters raw
RECORD = message_class("AMCTPytorchProto.ScaleOffsetRecord", schema="pytorch")
SAMPLES = {
    "ptq.cfg": "AMCTConfig",
    "ada_round.cfg": "AMCTConfig",
    "dmq_balancer.cfg": "AMCTConfig",
    "qat.cfg": "AMCTRetrainConfig",
    "prune.cfg": "AMCTRetrainConfig",
    "selective_prune.cfg": "AMCTRetrainConfig",
    "prune_int8.cfg": "AMCTRetrainConfig",
    "selective_prune_int8.cfg": "AMCTRetrainConfig",
    "record_quant.txt": "ScaleOffsetRecord",
    "record_dmq.txt": "ScaleOffsetRecord",
    "record_prune.txt": "ScaleOffsetRecord",
    "record_selective_prune.txt": "ScaleOffsetRecord",
}

text_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def scalar_values(field):
    """Values a field can hold, by its type."""
    kinds = {
        field.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        field.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
        field.CPPTYPE_BOOL: st.booleans(),
        field.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
        field.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
        field.CPPTYPE_STRING: st.binary(max_size=8) if field.type == field.TYPE_BYTES else text_values,
    }
    if field.enum_type:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return kinds[field.cpp_type]


@st.composite
def messages(draw, full_name, schema):
    message = message_class(full_name, schema=schema)()
    _fill(draw, message, depth=0)
    return message


def _fill(draw, message, depth):
    infos = table_of(message.DESCRIPTOR).fields
    chosen = draw(st.sets(st.sampled_from(sorted(infos)), max_size=4)) if depth < 4 else set()
    for field in message.DESCRIPTOR.fields:
        info = infos[field.name]
        if field.name not in chosen and not info.required:
            continue
        if info.message is not None:
            inner = [getattr(message, field.name)]
            if info.repeated:
                inner = [getattr(message, field.name).add() for _ in range(draw(st.integers(1, 2)))]
            else:
                inner[0].SetInParent()
            for block in inner:
                _fill(draw, block, depth + 1)
        elif info.repeated:
            getattr(message, field.name).extend(draw(st.lists(scalar_values(field), max_size=3)))
        else:
            setattr(message, field.name, draw(scalar_values(field)))


@pytest.mark.parametrize(("schema", "full_name"), TYPES, ids=[full_name for _, full_name in TYPES])
@given(data=st.data())
def test_random_messages_read_back_equal(data, schema, full_name):
    message = data.draw(messages(full_name, schema))
    style = data.draw(
        st.sampled_from(
            [
                {},
                {"as_utf8": WRITES_READABLE_UTF8},
                {"as_one_line": True},
                {"pointy_brackets": True},
                {"use_index_order": True},
                {"use_short_repeated_primitives": True},
                {"force_colon": True},
            ]
        )
    )
    if WRITES_READABLE_UTF8:
        assert format_text(message) == text_format.MessageToString(message, as_utf8=True)
    for text in (text_format.MessageToString(message, **style), format_text(message)):
        parsed = parse_text(text, message.DESCRIPTOR, "random")
        assert parsed.to_message() == message
        assert parsed.warnings == []
        assert text_format.Parse(text, type(message)()) == message
    assert read_binary(message.SerializeToString(), type(message), "random") == message


@given(number=st.floats(width=32, allow_nan=False))
def test_float32_survives_text_bit_by_bit(number):
    record = RECORD()
    record.record.add(key="x").value.scale_d = number
    text = format_text(record)
    back = parse_text(text, RECORD.DESCRIPTOR, "record.txt").to_message().record[0].value.scale_d
    assert struct.pack("<f", back) == struct.pack("<f", number)
    assert format_text(parse_text(text, RECORD.DESCRIPTOR, "record.txt").to_message()) == text


@given(bits=st.integers(0, 2**32 - 1))
def test_shortest_float_is_protobufs(bits):
    (number,) = struct.unpack("<f", struct.pack("<I", bits))
    assume(number == number)
    record = RECORD()
    record.record.add().value.scale_d = number
    written = text_format.MessageToString(record).split("scale_d: ")[1].split()[0]
    assert shortest_float(number) == float(written)


@given(literal=st.from_regex(r"-?(0|[1-9][0-9]{0,11})(\.[0-9]{0,12})?([eE][+-]?[0-9]{1,2})?", fullmatch=True))
def test_a_written_float_becomes_protobufs_float32(literal):
    value = text_format.Parse(f"record {{ value {{ scale_d: {literal} }} }}", RECORD()).record[0].value.scale_d
    assume(abs(value) != float("inf"))
    ours = parse_text(f"record {{ value {{ scale_d: {literal} }} }}", RECORD.DESCRIPTOR, "x").to_message()
    assert ours.record[0].value.scale_d == value


@given(name=text_values)
def test_names_survive_text(name):
    record = RECORD()
    record.record.add(key=name)
    assert parse_text(format_text(record), RECORD.DESCRIPTOR, "record.txt").all("record")[0].get("key") == name


def test_real_records_read_and_write_byte_for_byte(golden):
    paths = sorted((golden / "schema" / "records").glob("*.txt"))
    assert len(paths) == 12
    for path in paths:
        text = path.read_text(encoding="utf-8")
        parsed = parse_text(path.read_bytes(), RECORD.DESCRIPTOR, path.name)
        message = parsed.to_message()
        assert parsed.warnings == []
        assert message == text_format.Parse(text, RECORD())
        assert format_text(message) == text


@pytest.mark.parametrize(("name", "message_name"), SAMPLES.items())
def test_samples_of_the_documents_mean_what_protobuf_says(golden, name, message_name):
    text = (golden / "schema" / "samples" / name).read_text(encoding="utf-8")
    kind = message_class(f"AMCTPytorchProto.{message_name}", schema="pytorch")
    parsed = parse_text(text, kind.DESCRIPTOR, name)
    assert parsed.to_message() == text_format.Parse(text, kind())
    assert parsed.warnings == []


def test_caffe_sample_means_what_protobuf_says(golden):
    text = (golden / "schema" / "samples" / "caffe_snq.cfg").read_text(encoding="utf-8")
    kind = message_class("AMCTCaffeProto.AMCTConfig", schema="caffe_config")
    parsed = parse_text(text, kind.DESCRIPTOR, "quant.cfg")
    assert parsed.to_message() == text_format.Parse(text, kind())
    assert parsed.get("common_config").get("snq_quantize").get("min_distance") == 1e-10
    assert parsed.get("bn_update_config").get("bn_dump_dir") == "tmp/bn_data"


def test_old_caffe_record_is_read_beside_the_new(golden):
    text = (golden / "schema" / "samples" / "caffe_record_without_brace.txt").read_text(encoding="utf-8")
    repaired = text.replace("} record {", "}}\nrecord {")
    record = parse_text(repaired, descriptor("AMCTCaffeProto.ScaleOffsetRecord", schema="caffe_config"), "record.txt")
    first = record.all("record")[0].get("value")
    assert first.get("scale_d") == 0.01424
    assert first.all("shift_bit") == [1, 1, 1]
    assert first.get("record_d").get("scale_d") == 1.554879
    assert [entry.get("key") for entry in record.all("record")] == ["conv1", "pool1", "fc1000"]


def test_layout_is_the_documents():
    record = RECORD()
    layer = record.record.add(key="卷积")
    layer.value.scale_d = 0.7
    layer.value.offset_w.extend([0, 0])
    layer.value.skip_fusion = True
    attribute = record.prune_record.add().selective_prune
    attribute.name = 'a"b'
    attribute.attr.add(name="type", type=3, s=b"Conv")
    assert format_text(record) == (
        'record {\n  key: "卷积"\n  value {\n    scale_d: 0.7\n    offset_w: 0\n    offset_w: 0\n'
        "    skip_fusion: true\n"
        '  }\n}\nprune_record {\n  selective_prune {\n    name: "a\\"b"\n    attr {\n      name: "type"\n'
        '      type: STRING\n      s: "Conv"\n    }\n  }\n}\n'
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\xff", "record.bin: not a binary AMCTPytorchProto.ScaleOffsetRecord: .*cut off, or text"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "record.bin: not a binary"),
        (
            b"\x12\x02\x0a\x00",
            r"record.bin: a AMCTPytorchProto.ScaleOffsetRecord needs prune_record\[0\].producer\[0\].name",
        ),
        (b"\x28\x01", "record.bin: nothing in it is a field of AMCTPytorchProto.ScaleOffsetRecord"),
        (b"\x0a\x03\x12" * 100_000, "record.bin: not a binary"),
    ],
)
def test_broken_binary(data, message):
    with pytest.raises(ParseError, match=message):
        read_binary(data, RECORD, "record.bin")


def test_binary_wants_bytes():
    with pytest.raises(ArgumentTypeError, match="data must be bytes, got str"):
        read_binary("text", RECORD, "record.bin")


def test_binary_of_nothing_is_an_empty_message():
    assert read_binary(b"", RECORD, "record.bin") == RECORD()
    assert read_binary(bytearray(b"\x0a\x02\x0a\x00"), RECORD, "record.bin").record[0].key == ""
