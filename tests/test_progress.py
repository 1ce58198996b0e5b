"""Progress bars: seen on a terminal, silent everywhere else, and never in the way of the work."""

import os
import re
import subprocess
import sys

import pytest
from rich.progress import Task

from amct.errors import ArgumentError
from amct.log import bar, rate_text, time_text, track

posix_only = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are a Unix thing")

PROGRAM = """
import logging, sys
from amct import log
from amct.log import bar, track
for item in track(range(3), "Reading [bold]net[0]"):
    print("out", item)
with bar("Outer", total=2) as advance:
    for item in track(iter("ab"), "Inner"):
        advance(description=f"Outer {item}")
        logging.getLogger("amct.x").warning("[red]seen[/red]")
"""


def test_without_a_terminal_nothing_is_written(capsys):
    assert list(track([1, 2, 3], "Reading")) == [1, 2, 3]
    with bar("Calibrating", total=2) as advance:
        advance()
        advance(2, description="more")
    assert capsys.readouterr() == ("", "")


def test_items_of_any_iterable_pass_through():
    class Stream:
        def __iter__(self):
            return iter((1, 2))

        def __len__(self):
            raise TypeError("a stream has no length")

    assert list(track(Stream(), "Reading")) == [1, 2]
    assert list(track((letter for letter in "ab"), "Reading", total=2)) == ["a", "b"]
    assert list(track([], "Reading")) == []


def test_errors_of_the_work_pass_through():
    with pytest.raises(ZeroDivisionError), bar("Dividing"):
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(track((1 / number for number in [0]), "Dividing"))


def test_no_standard_error_is_no_trouble(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(track([1], "Reading")) == [1]


def on_a_terminal(program, tmp_path, **environment):
    """Run with standard error on a pseudo-terminal; return what it showed and what came out of standard output."""
    import pty

    primary, secondary = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment}
    variables.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=secondary, env=variables, cwd=tmp_path
    )
    os.close(secondary)
    shown = b""
    while True:
        try:
            chunk = os.read(primary, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    out = process.communicate()[0]
    os.close(primary)
    assert process.returncode == 0, shown.decode()
    return shown.decode("utf-8", "replace"), out.decode()


@posix_only
def test_on_a_terminal_the_bar_is_seen(tmp_path):
    shown, out = on_a_terminal(PROGRAM, tmp_path)
    assert "Reading [bold]net[0]" in shown, "brackets of a layer name are not style tags"
    assert "3/3" in shown
    assert "Outer b" in shown
    assert "Inner" in shown
    assert "2/2" in shown
    assert "[red]seen[/red]" in shown
    assert out == "out 0\nout 1\nout 2\n", "what is piped away does not go to the terminal"


@posix_only
@pytest.mark.parametrize("level", ["ERROR", "warning"])
def test_on_a_terminal_nothing_is_seen_when_only_trouble_is_wanted(tmp_path, level):
    shown, out = on_a_terminal(PROGRAM.replace(".warning(", ".debug("), tmp_path, AMCT_LOG_LEVEL=level)
    assert shown == ""
    assert out == "out 0\nout 1\nout 2\n"


@posix_only
def test_after_an_error_the_next_bar_works(tmp_path):
    program = """
from amct.log import bar, track
try:
    for item in track(range(2), "First"):
        raise KeyError
except KeyError:
    pass
list(track(range(5), "Second"))
"""
    shown, _ = on_a_terminal(program, tmp_path)
    assert "Second" in shown
    assert "5/5" in shown


def task(done, *, before=0, total=100, seconds=10.0, unit="batches"):
    fields = {"unit": unit, "before": before}
    made = Task(0, "", total, done, lambda: seconds, fields=fields)
    made.start_time = 0.0
    return made


def test_the_rate_and_the_time_left():
    assert rate_text(task(20)) == "2.0 batches/s"
    assert rate_text(task(20, unit="")) == "2.0/s"
    assert rate_text(task(4)) == "2.5 s each"
    assert time_text(task(20)) == "0:00:40 left"
    assert time_text(task(20, total=200_000)) == "27:46:30 left"
    assert time_text(task(20, total=None, seconds=3723)) == "1:02:03 so far"
    assert (rate_text(task(0)), time_text(task(0))) == ("", "-:--:-- left")
    assert time_text(task(100)) == "0:00:00 left"


def test_what_was_done_before_does_not_count_in_the_rate():
    assert rate_text(task(60, before=40)) == "2.0 batches/s"
    assert time_text(task(60, before=40)) == "0:00:20 left"
    assert (rate_text(task(40, before=40)), time_text(task(40, before=40))) == ("", "-:--:-- left")


@posix_only
def test_rate_and_time_are_seen_on_a_terminal(tmp_path):
    program = """
import time
from amct.log import bar
with bar("Calibrating", total=30, unit="batches", done=10) as advance:
    for _ in range(20):
        time.sleep(0.02)
        advance()
"""
    shown, _ = on_a_terminal(program, tmp_path)
    assert "10/30" in shown
    assert "30/30" in shown
    assert re.search(r"[0-9.]+ batches/s", shown)
    assert re.search(r"0:00:0[0-9] left", shown)


@posix_only
def test_wrong_level_is_an_error_on_a_terminal_too(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("AMCT_LOG_LEVEL", "loud")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ArgumentError, match="AMCT_LOG_LEVEL must be one of"):
        list(track([1], "Reading"))
