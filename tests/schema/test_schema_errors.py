"""Every mistake has its message and its line and column."""

import pytest

from amct.errors import AmctError, ParseError, Position
from amct.schema import descriptor, parse_text

CONFIG = descriptor("AMCTPytorchProto.AMCTConfig", schema="pytorch")
RETRAIN = descriptor("AMCTPytorchProto.AMCTRetrainConfig", schema="pytorch")
ATTRIBUTE = descriptor("AMCTProto.AttrProto", schema="pytorch")
IFMR = descriptor("AMCTPytorchProto.FMRQuantize", schema="pytorch")
NET = descriptor("caffe.NetParameter", schema="caffe")
CAFFE_RECORD = descriptor("AMCTCaffeProto.ScaleOffsetRecord", schema="caffe_config")

MISTAKES = [
    # names
    ("batch_nums: 1", 1, 1, 'AMCTConfig has no field batch_nums. Did you mean "batch_num"?'),
    ("do_fusion: 1\n Batch_Num: 1", 2, 2, 'AMCTConfig has no field Batch_Num. Did you mean "batch_num"?'),
    (
        "common_config { zzz {} }",
        1,
        17,
        "CalibrationConfig has no field zzz. Its fields are arq_quantize, ada_quantize",
    ),
    ("NUQuantize { x: 1 }", 1, 1, "AMCTConfig has no field NUQuantize."),
    (
        "common_config {\n batch_num: 1 }",
        2,
        2,
        "CalibrationConfig has no field batch_num, but AMCTConfig has: is it in",
    ),
    # values
    ("batch_num: -1", 1, 12, "batch_num takes an integer (uint32), got -1: it must lie in 0..4294967295"),
    ("batch_num: 4294967296", 1, 12, "got 4294967296: it must lie in 0..4294967295"),
    ("batch_num: 0x100000000", 1, 12, "got 0x100000000: it must lie in 0..4294967295"),
    ("batch_num: 1.5", 1, 12, "batch_num takes an integer (uint32), got 1.5"),
    ("batch_num: 1e3", 1, 12, "batch_num takes an integer (uint32), got 1e3"),
    ("batch_num: 09", 1, 12, "batch_num takes an integer (uint32), got 09"),
    ("batch_num: 1_000", 1, 12, "batch_num takes an integer (uint32), got 1_000"),
    ("batch_num: 2x", 1, 12, "batch_num takes an integer (uint32), got 2x"),
    ("batch_num: two", 1, 12, "batch_num takes an integer (uint32), got two"),
    ('batch_num: "2"', 1, 12, "batch_num takes an integer (uint32), got a quoted string"),
    ('batch_num: "\\x32"', 1, 12, "batch_num takes an integer (uint32), got a quoted string"),
    ("batch_num: inf", 1, 12, "batch_num takes an integer (uint32), got inf"),
    ("batch_num: " + "9" * 5000, 1, 12, "got a number of 5000 characters"),
    ("batch_num: {}", 1, 1, "batch_num takes an integer (uint32), got a block { }"),
    ("batch_num: [1]", 1, 12, "batch_num takes an integer (uint32), not a list: it is not repeated"),
    ("batch_num: }", 1, 12, 'batch_num takes an integer (uint32), got "}"'),
    ("batch_num:", 1, 11, "batch_num takes an integer (uint32), got the end of the file"),
    ("batch_num: -", 1, 13, "batch_num takes an integer (uint32), got the end of the file"),
    ("do_fusion: yes", 1, 12, "do_fusion takes true or false, got yes"),
    ("do_fusion: TRUE", 1, 12, "do_fusion takes true or false, got TRUE"),
    ("do_fusion: 2", 1, 12, "do_fusion takes true or false, got 2"),
    ("do_fusion: -1", 1, 12, "do_fusion takes true or false, got -1"),
    ("skip_layers: conv1", 1, 14, "skip_layers takes a quoted string, got conv1"),
    ("skip_layers: 1", 1, 14, "skip_layers takes a quoted string, got 1"),
    ("common_config: 1", 1, 16, "common_config takes a block { }, got 1"),
    ("common_config: conv", 1, 16, "common_config takes a block { }, got conv"),
    ('common_config: "x"', 1, 16, "common_config takes a block { }, got a quoted string"),
    ("fakequant_precision_mode: FP16", 1, 27, "takes one of FORCE_FP16_QUANT; got FP16"),
    ("fakequant_precision_mode: 2", 1, 27, "takes one of FORCE_FP16_QUANT = 1; got 2"),
    ("fakequant_precision_mode: 99999999999", 1, 27, "it must lie in -2147483648..2147483647"),
    # strings
    ('skip_layers: "abc', 1, 14, 'the string that begins here has no closing " on its line'),
    ("skip_layers: 'abc\n'", 1, 14, "the string that begins here has no closing ' on its line"),
    ('skip_layers: "a\\q"', 1, 16, "skip_layers has an unknown escape \\q; a backslash itself is written \\\\"),
    ('skip_layers: "ok" "a\\xzz"', 1, 21, "skip_layers has an unknown escape \\x"),
    ('skip_layers: "a\\777"', 1, 16, "skip_layers has the escape \\777, which is more than a byte"),
    ('skip_layers: "\\ud800"', 1, 15, "skip_layers has the escape \\ud800, which is no Unicode character"),
    ('skip_layers: "\\U00110000"', 1, 15, "which is no Unicode character"),
    ('skip_layers: "\\u12"', 1, 15, "skip_layers has an unknown escape \\u"),
    ('skip_layers: "\\xff"', 1, 14, "skip_layers is text, but its escapes give the byte 0xff: not UTF-8"),
    # grammar
    ("batch_num 2", 1, 11, 'expected ":" or "{" after batch_num, got 2'),
    ("batch_num", 1, 10, 'expected ":" or "{" after batch_num, got the end of the file'),
    ("batch_num = 2", 1, 11, "unexpected character '='"),
    ("batch_num： 2", 1, 10, "unexpected character '：'"),
    ("batch_num: 2 @", 1, 14, "unexpected character '@'"),
    ("batch_num: +2", 1, 12, "unexpected character '+'"),
    (": 2", 1, 1, 'expected a field name, got ":"'),
    ("2: 2", 1, 1, "expected a field name, got 2"),
    ('"batch_num": 2', 1, 1, 'expected a field name, got "batch_num"'),
    ("{ batch_num: 2 }", 1, 1, 'expected a field name, got "{"'),
    ("batch_num: 2;;", 1, 14, 'expected a field name, got ";"'),
    ("; batch_num: 2", 1, 1, 'expected a field name, got ";"'),
    ("common_config {, }", 1, 16, 'expected a field name, got ","'),
    ("[amct.extension]: 2", 1, 1, "extensions and Any are not part of this format"),
    ("common_config {\n  arq_quantize {\n}\n", 1, 1, 'the file ends before the "}" of this block of common_config'),
    ("batch_num: 1 }", 1, 14, '"}" closes nothing: no block is open here'),
    ("common_config {\n>", 2, 1, 'expected "}" for the block opened at net.cfg:1:1, got ">"'),
    ("common_config <\n}", 2, 1, 'expected ">" for the block opened at net.cfg:1:1, got "}"'),
    ('skip_layers: ["a" "b"', 1, 22, 'expected "," or "]" in the list, got the end of the file'),
    ('skip_layers: ["a"; "b"]', 1, 18, 'expected "," or "]" in the list, got ";"'),
    ('skip_layers: ["a",]', 1, 19, 'skip_layers takes a quoted string, got "]"'),
    ('skip_layers: [["a"]]', 1, 15, 'skip_layers takes a quoted string, got "["'),
    ("override_layer_types: [{}}", 1, 26, 'expected "," or "]" in the list, got "}"'),
    ("override_layer_types: [{}, 3]", 1, 28, 'expected "{" for the next item of the list, got 3'),
    # required
    ('\noverride_layer_configs { layer_name: "a" }', 2, 1, "OverrideLayer needs calibration_config"),
    ("override_layer_configs {}", 1, 1, "OverrideLayer needs layer_name and calibration_config"),
    # encodings
    (b"batch_num: 2\n # \xe5\x8d\xb7\xff", 2, 5, "the byte 0xff is not UTF-8; save the file as UTF-8"),
    (b"\xef\xbb\xbfab\xff", 1, 3, "the byte 0xff is not UTF-8"),
    (b"\xff\xfeb\x00", 1, 1, "the file is UTF-16; save it as UTF-8"),
    (b"\xfe\xff\x00b", 1, 1, "the file is UTF-16; save it as UTF-8"),
    ("batch_num: 2\n\0", 2, 1, "a NUL character cannot stand in a text file; is this a binary file?"),
    ('skip_layers: "\ud800"', 1, 15, "the character U+D800 (half of a surrogate pair) is not text"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), MISTAKES, ids=[repr(case[0])[:50] for case in MISTAKES])
def test_mistake(text, line, column, message):
    with pytest.raises(ParseError) as caught:
        parse_text(text, CONFIG, "net.cfg")
    assert caught.value.position == Position("net.cfg", line, column)
    assert message in caught.value.problems[0].message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("search_step: 1e999", 14, "takes a decimal number, got 1e999: it is too large (write inf to mean infinity)"),
        ("search_step: -1e999", 14, "got -1e999: it is too large"),
        ("search_step: 1e39", 14, "got 1e39: it is too large for float32, whose end is 3.4028235e+38"),
        ("search_step: 3.4028236e38", 14, "too large for float32"),
        ("search_step: 0x10", 14, "search_step takes a decimal number, got 0x10"),
        ("search_step: 010", 14, "search_step takes a decimal number, got 010"),
        ("search_step: 1.2.3", 14, "search_step takes a decimal number, got 1.2.3"),
        ("search_step: 1e", 14, "search_step takes a decimal number, got 1e"),
        ("search_step: infinit", 14, "search_step takes a decimal number, got infinit"),
        ("search_step: 0." + "1" * 1000, 14, "search_step takes a decimal number, got one of 1002 characters"),
        ("search_step: .", 14, "unexpected character '.'"),
        ("dst_type: INT9", 11, 'dst_type takes one of INT8, INT16; got INT9. Did you mean "INT8"?'),
        ("dst_type: INT4", 11, "dst_type takes one of INT8, INT16; got INT4."),
        ("dst_type: -INT8", 11, "dst_type takes one of INT8, INT16; got -INT8."),
    ],
)
def test_number_and_enum_mistake(text, column, message):
    with pytest.raises(ParseError) as caught:
        parse_text(text, IFMR, "net.cfg")
    assert caught.value.position == Position("net.cfg", 1, column)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("i: 9223372036854775808", "must lie in -9223372036854775808..9223372036854775807"),
        ("i: -9223372036854775809", "must lie in"),
        ("ints: [1, 2, 1e5]", "ints takes an integer (int64), got 1e5"),
        ("floats: [1.0, x]", "floats takes a decimal number, got x"),
        ("type: STRNGS", 'Did you mean "STRINGS"?'),
    ],
)
def test_attribute_mistake(text, message):
    with pytest.raises(ParseError) as caught:
        parse_text(text, ATTRIBUTE, "record.txt")
    assert message in str(caught.value)


def test_mistakes_are_reported_together():
    text = 'batch_nums: 1\ndo_fusion: maybe\nfoo { bar: [1, { a: "x" }] baz: <> }\nskip_layers: 3\nbatch_num: 1'
    with pytest.raises(ParseError) as caught:
        parse_text(text, CONFIG, "net.cfg")
    assert [str(problem.position) for problem in caught.value.problems] == [
        "net.cfg:1:1",
        "net.cfg:2:12",
        "net.cfg:3:1",
        "net.cfg:4:14",
    ]
    assert str(caught.value).startswith("4 mistakes:\n  net.cfg:1:1: AMCTConfig has no field batch_nums.")


def test_a_wrong_value_is_not_also_called_missing():
    text = "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: x clip_min: -1.0 } } }"
    with pytest.raises(ParseError) as caught:
        parse_text(text, RETRAIN, "net.cfg")
    assert [problem.message for problem in caught.value.problems] == ["clip_max takes a decimal number, got x"]


def test_every_missing_required_field_is_reported():
    with pytest.raises(ParseError) as caught:
        parse_text('override_layer_configs {}\noverride_layer_types { layer_type: "a" }', CONFIG, "net.cfg")
    assert [str(problem) for problem in caught.value.problems] == [
        "net.cfg:1:1: OverrideLayer needs layer_name and calibration_config",
        "net.cfg:2:1: OverrideLayerType needs calibration_config",
    ]


def test_reporting_stops_after_twenty_mistakes():
    with pytest.raises(ParseError) as caught:
        parse_text("zzz: 1\n" * 1000, CONFIG, "net.cfg")
    assert len(caught.value.problems) == 20


def test_a_grammar_mistake_comes_after_the_others():
    with pytest.raises(ParseError) as caught:
        parse_text("zzz: 1\nbatch_num = 2\nyyy: 1", CONFIG, "net.cfg")
    assert [str(problem.position) for problem in caught.value.problems] == ["net.cfg:1:1", "net.cfg:2:11"]


def test_unknown_field_of_a_large_message_names_one_near_it():
    with pytest.raises(ParseError, match=r"LayerParameter has no field qqqqq\. The nearest is \w+\."):
        parse_text("layer { qqqqq: 1 }", NET, "net.prototxt")
    with pytest.raises(ParseError, match='Did you mean "convolution_param"'):
        parse_text("layer { convolution_params { } }", NET, "net.prototxt")


def test_missing_brace_of_the_guides_record_is_found_where_it_shows(golden):
    text = (golden / "schema" / "samples" / "caffe_record_without_brace.txt").read_bytes()
    with pytest.raises(ParseError) as caught:
        parse_text(text, CAFFE_RECORD, "record.txt")
    assert str(caught.value) == (
        "record.txt:21:3: MapFiledEntry has no field record, but ScaleOffsetRecord has: is it in the wrong place, or "
        'is a "}" missing before it? The block of record opened at record.txt:1:1 is still open'
    )


def test_dots_of_the_documents_are_a_mistake(golden):
    text = (golden / "schema" / "samples" / "ptq_hfmg_with_dots.cfg").read_bytes()
    with pytest.raises(ParseError, match=r"^quant.cfg:4:1: unexpected character '\.'$"):
        parse_text(text, CONFIG, "quant.cfg")


def test_long_text_is_cut_in_messages():
    with pytest.raises(ParseError) as caught:
        parse_text("x" * 100_000 + ": " + "y" * 100_000, CONFIG, "net.cfg")
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, AmctError)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("layer { include { stage: 'a' } }", 2),
        ("layer [{ include [<>] }]", 2),
        ("zzz { y { x < > } }", 3),
    ],
)
def test_depth_is_limited(text, depth):
    if not text.startswith("zzz"):
        parse_text(text, NET, "net.prototxt", max_depth=depth)
    with pytest.raises(ParseError, match=f"blocks nest deeper than {depth - 1}"):
        parse_text(text, NET, "net.prototxt", max_depth=depth - 1)


@pytest.mark.parametrize("opening", ["layer { ", "x { ", "x: [{ ", "x < ", "layer: [{ x: <", "common_config {"])
def test_ten_thousand_levels_are_an_error_and_not_a_crash(opening):
    with pytest.raises(ParseError):
        parse_text(opening * 10_000, NET, "net.prototxt")
    with pytest.raises(ParseError):
        parse_text(opening * 10_000, NET, "net.prototxt", max_depth=1_000_000)
