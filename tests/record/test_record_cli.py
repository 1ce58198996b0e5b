"""``amct record show | diff | convert``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from amct.cli.record import app
from amct.errors import AmctError, FileError, RecordParseError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    LayerRecord,
    PruneNode,
    PruneRecord,
    Record,
    describe_record,
    parse_record,
    plain_record,
    read_record,
    write_record,
)

RECORD = Record(
    {
        "conv1": LayerRecord(scale_d=0.1, offset_d=-3, scale_w=(0.5, 0.25), offset_w=(0, 0), act_type="INT8"),
        "layer.long.name": LayerRecord(
            scale_w=tuple(float(number) for number in range(1, 9)),
            scale_h=0.5,
            offset_h=1,
            scale_r=(0.5,),
            tensor_balance_factor=(1.0,),
            skip_fusion=True,
            wts_type="INT4",
        ),
    },
    prune=(
        PruneRecord(
            producers=(PruneNode.channels("conv1", "Conv2d", 0, 8, (1,)),),
            consumers=(PruneNode.channels("bn", "BatchNorm2d", 0, 8, (1,)),),
        ),
    ),
)
CAFFE = CaffeRecord(
    {
        "sum": CaffeLayerRecord(
            object_layer="sum0",
            skip_fusion=True,
            record_d=(DataFactors(scale=0.1, offset=1, num_bits=12), DataFactors(index=1, scale=0.2, offset=2)),
        ),
        "fc": CaffeLayerRecord(scale_w=(0.5,), offset_w=(0,), num_bits_w=4),
    }
)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, AmctError):
        raise result.exception
    return result.exit_code, result.output


def test_show_prints_a_table(tmp_path):
    write_record(RECORD, tmp_path / "r.txt")
    assert run("show", tmp_path / "r.txt")[1] == (
        "layer            act   scale_d  offset_d  wts   scale_w              more\n"
        "conv1            INT8  0.1      -3        INT8  0.5, 0.25\n"
        "layer.long.name  INT8  -        -         INT4  8 values 1.0 .. 8.0  "
        "hidden state 0.5, 1; scale_r 0.5; balance 1.0; skip_fusion\n"
        "pruned: conv1 (Conv, 1 channel removed) -> bn (BatchNormalization, 1 channel removed)\n"
    )


def test_show_prints_a_caffe_table(tmp_path):
    write_record(CAFFE, tmp_path / "r.bin")
    assert run("show", tmp_path / "r.bin")[1] == (
        "layer  data bits  scale_d   offset_d  weight bits  scale_w  more\n"
        "sum    12, 8      0.1, 0.2  1, 2      -            -        of sum0; skip_fusion\n"
        "fc     -          -         -         4            0.5\n"
    )


def test_show_tells_oddities_and_empty_records():
    text = 'record { key: "a" value { offset_d: 1 } } record { key: "a" value { offset_d: 2 } }'
    assert describe_record(parse_record(text, "r")).endswith(
        'note: r:1:43: layer "a" is given again; the last entry is used\n'
    )
    assert describe_record(Record()) == describe_record(CaffeRecord()) == "the record is empty\n"


def test_show_as_json(tmp_path, golden):
    write_record(RECORD, tmp_path / "r.txt")
    shown = json.loads(run("show", tmp_path / "r.txt", "--json")[1])
    assert shown == plain_record(RECORD)
    assert shown["dialect"] == "pytorch"
    assert shown["layers"]["conv1"] == {
        "scale_d": 0.1,
        "offset_d": -3,
        "scale_w": [0.5, 0.25],
        "offset_w": [0, 0],
        "act_type": "INT8",
    }
    assert shown["prune"] == [
        {
            "producer": [{"name": "conv1", "type": "Conv", "begin": 0, "end": 8, "prune_index": [1]}],
            "consumer": [{"name": "bn", "type": "BatchNormalization", "begin": 0, "end": 8, "prune_index": [1]}],
        }
    ]
    write_record(CAFFE, tmp_path / "c.txt")
    shown = json.loads(run("show", tmp_path / "c.txt", "--json")[1])
    assert shown["layers"]["sum"]["record_d[1].scale_d"] == 0.2
    masks = json.loads(run("show", golden / "amct" / "sparse_42" / "record.txt", "--json")[1])["prune"]
    assert masks[0]["selective_prune"]["mask_shape"] == [16, 3, 3, 3]


def test_json_has_no_infinity():
    shown = plain_record(Record({"a": LayerRecord(scale_d=float("inf"), scale_w=(float("nan"),))}))
    assert shown["layers"]["a"] == {"scale_d": "inf", "scale_w": ["nan"]}


def test_kv_cache_and_masks_are_shown(golden):
    shown = describe_record(read_record(golden / "amct" / "kv_ifmr_pc" / "record.txt"))
    assert shown.splitlines() == [
        "kv cache of layer  scale                                 offset",
        "k                  8 values 0.0053251283 .. 0.010501718  8 values -72 .. 47",
        "v                  0.012488055                           0",
    ]
    assert "4:2 mask: c1 [16, 3, 3, 3]\n" in describe_record(read_record(golden / "amct" / "sparse_42" / "record.txt"))


def test_diff_prints_lines_and_returns_whether_something_differs(tmp_path):
    write_record(RECORD, tmp_path / "a.txt")
    write_record(RECORD, tmp_path / "b.bin")
    assert run("diff", tmp_path / "a.txt", tmp_path / "b.bin") == (0, "")
    write_record(RECORD.with_layers({"conv1": LayerRecord(scale_d=0.2)}), tmp_path / "b.bin")
    code, output = run("diff", tmp_path / "a.txt", tmp_path / "b.bin")
    assert code == 1
    assert output.splitlines()[:2] == ["conv1: scale_d: 0.1 -> 0.2", "conv1: offset_d: -3 -> -"]
    code, output = run("diff", tmp_path / "a.txt", tmp_path / "b.bin", "--json")
    assert code == 1
    assert json.loads(output)[0] == {
        "entry": "conv1",
        "field": "scale_d",
        "kind": "changed",
        "left": 0.1,
        "right": 0.2,
    }


def test_convert_goes_both_ways_and_modernizes(tmp_path, golden):
    source = golden / "amct" / "small_mix_dmq" / "record.txt"
    assert run("convert", source, tmp_path / "r.bin")[1] == f"{tmp_path / 'r.bin'}: written as binary\n"
    assert run("convert", tmp_path / "r.bin", tmp_path / "r.txt")[1] == f"{tmp_path / 'r.txt'}: written as text\n"
    assert (tmp_path / "r.txt").read_bytes() == source.read_bytes()
    (tmp_path / "old.txt").write_text('record { key: "c" value { scale_d: 0.5 offset_d: 1 num_bits_w: 8 } }')
    run("convert", tmp_path / "old.txt", tmp_path / "new", "--form", "text")
    assert (tmp_path / "new").read_text() == (
        'record {\n  key: "c"\n  value {\n    num_bits_w: 8\n    record_d {\n      scale_d: 0.5\n      offset_d: 1\n'
        "      index: 0\n    }\n  }\n}\n"
    )


def test_errors_are_ours(tmp_path):
    (tmp_path / "bad.txt").write_text("record {")
    with pytest.raises(RecordParseError, match=r"bad.txt:1:1: "):
        run("show", tmp_path / "bad.txt")
    with pytest.raises(FileError, match="does not exist"):
        run("show", tmp_path / "none.txt")
    write_record(Record({"c": LayerRecord(scale_d=0.5)}), tmp_path / "r.bin")
    with pytest.raises(RecordParseError, match="choose one with dialect"):
        run("show", tmp_path / "r.bin")
    assert "0.5" in run("show", tmp_path / "r.bin", "--dialect", "pytorch")[1]


def test_help_names_every_option():
    for command, options in {
        "show": ["--dialect", "--json"],
        "diff": ["--dialect", "--json"],
        "convert": ["--form"],
    }.items():
        _, output = run(command, "--help")
        assert all(option in output for option in options)
