"""Names from files that control a terminal: they are shown escaped wherever this package prints."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from amct import log
from amct.cli import main
from amct.cli.printing import aligned
from amct.errors import AmctError, CheckpointError, ConfigError, Position, Problem
from amct.model import Skip
from amct.printable import LONGEST_LINE, escaped, printable, shortened
from amct.record import Record
from amct.report.summary import summary_text

HOSTILE = "conv\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp.\u2028\x00"
SAFE = "conv\\u001b]0;owned\\u0007\\u001b[2J\\u000d\\u009b31m\\u202egnp.\\u2028\\u0000"
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
PROTOTXT_NAME = "c\\033[31m\\302\\233\\r"
"""An escape sequence as a prototxt and a record write it."""


def test_controls_are_escaped_and_other_text_is_kept():
    assert escaped(HOSTILE) == SAFE
    assert escaped("层 é\t\n🙂") == "层 é\t\n🙂"
    assert escaped("\udcff") == "\\udcff"
    assert not CONTROLS.search(escaped("".join(map(chr, range(0x3000)))))


def test_escapes_mean_the_same_in_json():
    text = json.dumps({HOSTILE: "\x85\udcff"}, ensure_ascii=False)
    assert json.loads(escaped(text)) == {HOSTILE: "\x85\udcff"}


def test_long_lines_lose_their_middle():
    line = printable("first\n" + "x" * 10**6 + "\nlast")
    assert line.startswith("first\nxxx")
    assert line.endswith("xxx\nlast")
    assert re.search(r"…\(\d+ characters\)…", line)
    assert len(line) <= LONGEST_LINE + 20
    assert shortened("short") == "short"


@pytest.mark.parametrize("kind", [AmctError, CheckpointError, ConfigError])
def test_errors(kind):
    assert str(kind(f'layer "{HOSTILE}"')) == f'layer "{SAFE}"'
    several = kind.from_problems([Problem(HOSTILE, Position(HOSTILE, 1, 2)), Problem("other")])
    assert not CONTROLS.search(str(several))


def test_log_lines_on_the_screen_and_in_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log.start("amct_caffe")
    logging.getLogger("amct.x").warning('layer "%s"', HOSTILE)
    log.stop()
    assert capsys.readouterr().err == f'[AMCT][WARNING]layer "{SAFE}"\n'
    assert (tmp_path / "amct_log" / "amct_caffe.log").read_text().endswith(f'layer "{SAFE}"\n')


def test_tables_and_summaries():
    lines = aligned([[HOSTILE, "a"], ["x\ny", "b"], ["z" * 10**6, "c"]])
    assert lines[0].startswith(SAFE)
    assert lines[1].startswith("x\\ny ")
    assert max(map(len, lines)) < 400
    assert SAFE in summary_text("net", Record(), 0, [Skip(HOSTILE, "why"), Skip("other", HOSTILE)])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } } '
        f'layer {{ name: "{PROTOTXT_NAME}" type: "Convolution" bottom: "x" top: "y" '
        "convolution_param { num_output: 2 kernel_size: 1 } }"
    )
    record = 'record {{ key: "{name}" value {{ scale_d: {scale} offset_d: 1 scale_w: 1 offset_w: 0 }} }}'
    for name, scale in (("a", 0.5), ("b", 0.25)):
        (tmp_path / f"{name}.txt").write_text(record.format(name=PROTOTXT_NAME, scale=scale))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "net.prototxt"),
        ("inspect", "net.prototxt", "--json"),
        ("record", "show", "a.txt"),
        ("record", "show", "a.txt", "--json"),
        ("record", "diff", "a.txt", "b.txt"),
        ("record", "diff", "a.txt", "b.txt", "--json"),
        ("config", "explain", "config.json", "--model", "net.prototxt"),
        ("config", "explain", "config.json", "--model", "net.prototxt", "--json"),
        ("record", "show", "\x1b[31m.txt"),
        ("\x1b[31m",),
    ],
)
def test_commands(files, arguments, monkeypatch, capsys):
    monkeypatch.chdir(files)
    if arguments[0] == "config":
        assert main(["config", "init", "--model", "net.prototxt", "-o", "config.json"]) == 0
    main(list(arguments))
    shown = capsys.readouterr()
    assert not CONTROLS.search(shown.out + shown.err), shown
    assert re.search(r"\\(u00|x)1b\[31m", shown.out + shown.err)


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are a Unix thing")
def test_progress_bars():
    import pty

    program = """
from amct.log import bar
with bar("Reading conv\\x1b[31;1mA", total=2) as advance:
    advance(2, description="Reading \\x1b]0;owned\\x07B")
"""
    master, terminal = pty.openpty()
    run = subprocess.Popen([sys.executable, "-c", program], stderr=terminal, env={**os.environ, "COLUMNS": "200"})
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:  # the end of a pseudo-terminal
        pass
    os.close(master)
    assert run.wait() == 0
    assert b"\x1b[31;1mA" not in shown
    assert b"\x1b]0;owned" not in shown
    assert b"\\u001b]0;owned\\u0007B" in shown
