"""The text format as users write it, and what a TextMessage answers."""

import math

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, text_format

from amct.errors import ArgumentError, Position
from amct.schema import TextField, TextMessage, descriptor, format_text, parse_text, read_binary

CONFIG = descriptor("AMCTPytorchProto.AMCTConfig", schema="pytorch")
ATTRIBUTE = descriptor("AMCTProto.AttrProto", schema="pytorch")
RECORD = descriptor("AMCTPytorchProto.ScaleOffsetRecord", schema="pytorch")
IFMR = descriptor("AMCTPytorchProto.FMRQuantize", schema="pytorch")
LAYER = descriptor("AMCTPytorchProto.SingleLayerRecord", schema="pytorch")


def read(text, message=CONFIG):
    return parse_text(text, message, "net.cfg")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("batch_num: 2", "batch_num", 2),
        ("batch_num:2", "batch_num", 2),
        ("batch_num : 2", "batch_num", 2),
        ("batch_num\n:\n\t2", "batch_num", 2),
        ("batch_num: 2;", "batch_num", 2),
        ("batch_num: 2,", "batch_num", 2),
        ("batch_num: 2 # two", "batch_num", 2),
        ("# first\n#second\nbatch_num # third\n : # fourth\n 2 # fifth\n;", "batch_num", 2),
        ("batch_num: 0x1F", "batch_num", 31),
        ("batch_num: 0X1f", "batch_num", 31),
        ("batch_num: 017", "batch_num", 15),
        ("batch_num: 0", "batch_num", 0),
        ("batch_num: 4294967295", "batch_num", 2**32 - 1),
        ("do_fusion: true", "do_fusion", True),
        ("do_fusion: True", "do_fusion", True),
        ("do_fusion: t", "do_fusion", True),
        ("do_fusion: 1", "do_fusion", True),
        ("do_fusion: 0x01", "do_fusion", True),
        ("do_fusion: false", "do_fusion", False),
        ("do_fusion: False", "do_fusion", False),
        ("do_fusion: f", "do_fusion", False),
        ("do_fusion: 0", "do_fusion", False),
        ("fakequant_precision_mode: FORCE_FP16_QUANT", "fakequant_precision_mode", "FORCE_FP16_QUANT"),
        ("fakequant_precision_mode: 1", "fakequant_precision_mode", "FORCE_FP16_QUANT"),
        ("\ufeffbatch_num: 2", "batch_num", 2),
        (b"\xef\xbb\xbfbatch_num: 2", "batch_num", 2),
        ("batch_num: 2\r\ndo_fusion: true\r\n", "batch_num", 2),
        ("batch_num: 2\v\f", "batch_num", 2),
    ],
)
def test_scalar(text, field, value):
    message = read(text)
    assert message.get(field) == value
    assert type(message.get(field)) is type(value)
    assert message.warnings == []


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("0.7", 0.7),
        (".5", 0.5),
        ("5.", 5.0),
        ("5", 5.0),
        ("-0.25", -0.25),
        ("- 0.25", -0.25),
        ("1.5f", 1.5),
        ("10F", 10.0),
        ("1e-3", 0.001),
        ("1E+3", 1000.0),
        ("3.4028235e38", 3.4028235e38),
        ("1e-45", 1.4013e-45),
        ("1e-46", 0.0),
        ("0.999999", 0.999999),
        ("0.30000001192092896", 0.3),  # the same float32 as 0.3, whose shortest decimal is 0.3
        ("0.0798481479", 0.07984815),
        ("16777217", 16777216.0),
        ("inf", math.inf),
        ("Infinity", math.inf),
        ("-inf", -math.inf),
        ("- INFINITY", -math.inf),
        ("inff", math.inf),
    ],
)
def test_float(literal, value):
    assert read(f"search_step: {literal}", IFMR).get("search_step") == value


@pytest.mark.parametrize("literal", ["nan", "NaN", "-nan", "nanf"])
def test_nan_only_where_spelled(literal):
    assert math.isnan(read(f"search_step: {literal}", IFMR).get("search_step"))


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('"conv1"', "conv1"),
        ("'conv1'", "conv1"),
        ('""', ""),
        ('"it\'s"', "it's"),
        ("'say \"x\"'", 'say "x"'),
        ('"conv" "1"', "conv1"),
        ("\"conv\" # half\n 'the rest'", "convthe rest"),
        ('"a"\'b\'"c"', "abc"),
        (r'"\a\b\f\n\r\t\v\?\\\'\""', "\a\b\f\n\r\t\v?\\'\""),
        (r'"\101\0\7778"'.replace(r"\777", r"\177"), "A\0\x7f8"),
        (r'"\x41\x4\X42z"', "A\x04Bz"),
        (r'"\u5377\U0001F600"', "卷😀"),
        (r'"\ud83d\uDE00"', "😀"),
        ('"\\345\\215\\267"', "卷"),
        ('"卷积1"', "卷积1"),
        ('"# no comment"', "# no comment"),
        ('"{ not open }"', "{ not open }"),
    ],
)
def test_string(literal, value):
    message = read(f"skip_layers: {literal}")
    assert message.all("skip_layers") == [value]


def test_bytes_keep_what_is_not_text():
    message = read(r's: "\xff\000卷" strings: ["a", "b" "c"]', ATTRIBUTE)
    assert message.get("s") == b"\xff\x00" + "卷".encode()
    assert message.all("strings") == [b"a", b"bc"]


@pytest.mark.parametrize(
    "text",
    [
        "common_config { arq_quantize { quant_bits: 7 } }",
        "common_config: { arq_quantize : { quant_bits: 7 } }",
        "common_config < arq_quantize: < quant_bits: 7 > >",
        "common_config{arq_quantize<quant_bits:7>};",
        "common_config # why\n { # because\n arq_quantize { quant_bits: 7; }, }",
    ],
)
def test_block(text):
    block = read(text).get("common_config")
    assert isinstance(block, TextMessage)
    assert block.descriptor.name == "CalibrationConfig"
    assert block.get("arq_quantize").get("quant_bits") == 7


def test_lists():
    message = read(
        """skip_layers: ["a", 'b', "c" "d"], skip_layers: "e" skip_layers: []
        override_layer_types: [ { layer_type: "x" calibration_config {} }, < layer_type: "y" calibration_config <> > ];
        override_layer_types [{ layer_type: "z" calibration_config { arq_quantize {} } }]"""
    )
    assert message.all("skip_layers") == ["a", "b", "cd", "e"]
    assert [block.get("layer_type") for block in message.all("override_layer_types")] == ["x", "y", "z"]
    numbers = read("ints: [1, -2, 0x10] floats: [1, 2.5, -inf] ints: 7", ATTRIBUTE)
    assert numbers.all("ints") == [1, -2, 16, 7]
    assert numbers.all("floats") == [1.0, 2.5, -math.inf]


def test_integer_ends():
    message = read("i: -9223372036854775808 ints: 9223372036854775807", ATTRIBUTE)
    assert (message.get("i"), message.all("ints")) == (-(2**63), [2**63 - 1])
    layer = read("offset_d: -2147483648 offset_w: 2147483647 offset_w: -0x80000000 offset_w: - 017", LAYER)
    assert (layer.get("offset_d"), layer.all("offset_w")) == (-(2**31), [2**31 - 1, -(2**31), -15])


def test_empty_file_is_an_empty_message():
    for text in ("", " \n\t", "# only a comment", b""):
        message = read(text)
        assert message.fields == []
        assert message.position == Position("net.cfg", 1, 1)


def test_positions():
    message = read(
        '# head\nbatch_num: 2\n  skip_layers: "卷", skip_layers: ["b",\n "c"]\ncommon_config {\n\tarq_quantize {}\n}'
    )
    assert message.where("batch_num") == Position("net.cfg", 2, 1)
    assert message.where("skip_layers", 0) == Position("net.cfg", 3, 3)
    assert message.where("skip_layers", 1) == Position("net.cfg", 3, 35)
    assert message.where("skip_layers") == Position("net.cfg", 4, 2)
    block = message.get("common_config")
    assert block.position == Position("net.cfg", 5, 1)
    assert block.get("arq_quantize").position == Position("net.cfg", 6, 2)
    assert block.where("ifmr_quantize") == block.position
    assert str(message.fields[0].position) == "net.cfg:2:1"


def test_fields_are_in_file_order_and_frozen():
    message = read('skip_layers: "b" batch_num: 1 skip_layers: "a"')
    assert [(field.name, field.value) for field in message.fields] == [
        ("skip_layers", "b"),
        ("batch_num", 1),
        ("skip_layers", "a"),
    ]
    assert isinstance(message.fields[0], TextField)
    with pytest.raises(AttributeError):
        message.fields[0].value = "c"


def test_questions_about_absent_fields():
    message = read("batch_num: 3")
    assert message.has("batch_num")
    assert not message.has("skip_layers")
    assert not message.has("common_config")
    assert message.get("do_fusion") is None
    assert message.get("do_fusion", True) is True
    assert message.get("skip_layers", "none") == "none"
    assert message.all("skip_layers") == []
    assert message.all("common_config") == []
    assert message.all("batch_num") == [3]
    assert message.where("skip_layers") == message.position


def test_questions_with_a_misspelled_name():
    message = read("common_config {}")
    for ask in (message.has, message.get, message.all, message.where):
        with pytest.raises(ArgumentError, match=r"AMCTConfig has no field 'batchnum'\. Did you mean \"batch_num\""):
            ask("batchnum")
    with pytest.raises(ArgumentError, match=r"has no oneof 'wts_algo'\. Did you mean \"wts_quant_algo\""):
        message.get("common_config").which("wts_algo")


def test_repeated_scalar_keeps_the_last_value_and_warns():
    message = read("batch_num: 1\ndo_fusion: true\n  batch_num: 5\nbatch_num: 4")
    assert message.get("batch_num") == 4
    assert message.where("batch_num") == Position("net.cfg", 4, 1)
    assert message.where("batch_num", 0) == Position("net.cfg", 1, 1)
    assert message.to_message().batch_num == 4
    assert [str(warning) for warning in message.warnings] == [
        "net.cfg:3:3: batch_num is given again, first at net.cfg:1:1: the last value is used",
        "net.cfg:4:1: batch_num is given again, first at net.cfg:3:3: the last value is used",
    ]


def test_repeated_block_is_merged_and_warns():
    message = read(
        "common_config { arq_quantize { quant_bits: 7 } }\n"
        "common_config { arq_quantize { channel_wise: true quant_bits: 6 } dmq_balancer {} }"
    )
    block = message.get("common_config")
    assert message.fields[0].value is message.fields[1].value is block
    assert block.get("arq_quantize").get("quant_bits") == 6
    assert block.get("arq_quantize").get("channel_wise") is True
    assert block.has("dmq_balancer")
    assert [str(warning) for warning in message.warnings] == [
        "net.cfg:2:1: common_config is given again, first at net.cfg:1:1: the two blocks are merged",
        "net.cfg:2:17: arq_quantize is given again, first at net.cfg:1:17: the two blocks are merged",
        "net.cfg:2:51: quant_bits is given again, first at net.cfg:1:32: the last value is used",
    ]


def test_last_member_of_a_oneof_wins_and_warns():
    message = read(
        "common_config {\n arq_quantize { quant_bits: 7 }\n ada_quantize {}\n arq_quantize {}\n ifmr_quantize {} }"
    )
    block = message.get("common_config")
    assert block.which("wts_quant_algo") == "arq_quantize"
    assert block.which("acts_quant_algo") == "ifmr_quantize"
    assert block.which("tensor_balancer") is None
    assert not block.has("ada_quantize")
    assert block.get("ada_quantize") is None
    assert not block.get("arq_quantize").has("quant_bits"), "a replaced block is gone, not merged"
    assert [str(warning) for warning in message.warnings] == [
        "net.cfg:3:2: ada_quantize replaces arq_quantize given at net.cfg:2:2: only one of them can be set",
        "net.cfg:4:2: arq_quantize replaces ada_quantize given at net.cfg:3:2: only one of them can be set",
    ]
    assert message.to_message().common_config.WhichOneof("wts_quant_algo") == "arq_quantize"


def test_to_message_keeps_presence():
    message = read("common_config { arq_quantize {} } batch_num: 1 activation_offset: true").to_message()
    assert message.HasField("batch_num")
    assert message.HasField("activation_offset")
    assert not message.HasField("do_fusion")
    assert message.common_config.HasField("arq_quantize")


def test_required_fields_may_come_in_a_second_block():
    caffe = descriptor("AMCTPytorchProto.ActULQquantize", schema="pytorch")
    message = read("clip_max_min { clip_max: 1 } clip_max_min { clip_min: -1 }", caffe)
    assert message.get("clip_max_min").get("clip_min") == -1.0


def test_map_fields_of_a_users_own_proto():

    file = descriptor_pb2.FileDescriptorProto(name="custom.proto", package="custom", syntax="proto2")
    outer = file.message_type.add(name="Outer")
    for name, value in (("numbers", {"type": 5}), ("blocks", {"type": 11, "type_name": ".custom.Inner"})):
        entry = outer.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=9, label=1)
        entry.field.add(name="value", number=2, label=1, **value)
        entry_type = f".custom.Outer.{entry.name}"
        outer.field.add(name=name, number=len(outer.field) + 1, type=11, label=3, type_name=entry_type)
    file.message_type.add(name="Inner").field.add(name="x", number=1, type=5, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    message = read(
        'numbers { key: "a" value: 1 } numbers { key: "b" value: 2 } blocks { key: "c" value { x: 3 } }',
        pool.FindMessageTypeByName("custom.Outer"),
    ).to_message()
    assert dict(message.numbers) == {"a": 1, "b": 2}
    assert message.blocks["c"].x == 3
    assert format_text(message) == text_format.MessageToString(message)
    assert read_binary(message.SerializeToString(), type(message), "custom.bin") == message
