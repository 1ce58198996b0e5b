"""What commands print: strict JSON, aligned tables, few names, and few lines of the log."""

from __future__ import annotations

import json
import logging
import math

import pytest

from amct import log
from amct.cli.compare import _as_text
from amct.cli.printing import aligned, as_json, decibel, most_harmed
from amct.cli.quantize import _some
from amct.log import few_lines, line_level

ROWS = [
    {"layer": "good", "sqnr": 40.0, "cosine": 0.9999},
    {"layer": "equal", "sqnr": math.inf, "cosine": 1.0},
    {"layer": "bad", "sqnr": 9.5, "cosine": 0.9},
    {"layer": "broken", "sqnr": math.nan, "cosine": math.nan},
    {"layer": "gone", "sqnr": -math.inf, "cosine": 0.0},
]


def test_json_has_no_words_that_are_no_json():
    text = as_json({"layers": ROWS, "names": ("a", 1, True)})
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert [row["sqnr"] for row in read["layers"]] == [40.0, None, 9.5, None, None]
    assert read["names"] == ["a", 1, True]


def test_the_most_harmed_come_first_and_equal_ones_not_at_all():
    names = [row["layer"] for row in most_harmed(ROWS, 9)]
    assert set(names[:2]) == {"broken", "gone"}
    assert names[2:] == ["bad", "good"]
    assert len(most_harmed(ROWS, 2)) == 2


def test_columns_stand_below_each_other():
    assert aligned([("layer", "SQNR"), ("a", "9.5 dB"), ("longer name", "")]) == [
        "layer        SQNR",
        "a            9.5 dB",
        "longer name",
    ]
    assert (decibel(9.54), decibel(math.inf)) == ("9.5 dB", "no error")


def test_a_table_says_what_was_not_compared():
    told = {"float": ["a.onnx"], "quantized": ["b.onnx"], "batches": 1, "outputs": [], "boxes": [], "layers": []}
    lines = _as_text(told, 10).splitlines()
    assert "data       1 batch" in lines
    assert "no outputs were compared: they have no common shape" in lines
    assert lines[-1] == "no layers were compared: the two files have no layer under the same name"
    equal = {**told, "layers": ROWS[1:2], "outputs": [{"output": "y", "sqnr": math.inf, "cosine": 1.0}]}
    assert _as_text(equal, 10).splitlines()[-1] == "y       no error  1.00000"


def test_long_lists_of_names_are_cut():
    assert _some(["a", "b"]) == "a, b"
    assert _some([str(number) for number in range(9)]) == "0, 1, 2, 3, 4, 5 and 3 more"


def test_inside_a_command_only_warnings_reach_the_screen(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("AMCT_LOG_LEVEL", raising=False)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("amct.test_of_few_lines")
    with few_lines():
        assert line_level() == logging.WARNING
        log.start("amct_caffe")
        logger.info("counted")
        logger.warning("odd")
        monkeypatch.setenv("AMCT_LOG_LEVEL", "info")  # the user asks for them
        assert line_level() == logging.INFO
        monkeypatch.delenv("AMCT_LOG_LEVEL")
    assert line_level() == logging.INFO
    log.stop()
    assert capsys.readouterr().err == "[AMCT][WARNING]odd\n"
    assert "counted" in (tmp_path / "amct_log" / "amct_caffe.log").read_text()
