"""Log levels, the two destinations, and that nothing happens before a flow starts."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amct import log
from amct.errors import AmctError, ArgumentError

logger = logging.getLogger("amct.config.test")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AMCT_LOG_LEVEL", raising=False)
    monkeypatch.delenv("AMCT_LOG_FILE_LEVEL", raising=False)
    log.stop()
    yield
    log.stop()


def say_everything():
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("a %s line", level)


def test_screen_and_file_have_the_documented_form(tmp_path, capsys):
    log.start("amct_pytorch")
    say_everything()
    assert capsys.readouterr().err.splitlines() == [
        "[AMCT][INFO]a info line",
        "[AMCT][WARNING]a warning line",
        "[AMCT][ERROR]a error line",
    ]
    lines = (tmp_path / "amct_log" / "amct_pytorch.log").read_text().splitlines()
    assert [line.split(" - ", 1)[1] for line in lines] == [
        "INFO - [AMCT]:[amct.config.test]: a info line",
        "WARNING - [AMCT]:[amct.config.test]: a warning line",
        "ERROR - [AMCT]:[amct.config.test]: a error line",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("DEBUG", 4),
        ("debug", 4),
        ("Info", 3),
        ("", 3),
        (" warning ", 2),
        ("ERROR", 1),
    ],
)
def test_levels_of_screen_and_file_are_independent(monkeypatch, tmp_path, capsys, value, shown):
    monkeypatch.setenv("AMCT_LOG_LEVEL", value)
    monkeypatch.setenv("AMCT_LOG_FILE_LEVEL", "ERROR")
    log.start("amct_caffe")
    say_everything()
    assert len(capsys.readouterr().err.splitlines()) == shown
    assert len((tmp_path / "amct_log" / "amct_caffe.log").read_text().splitlines()) == 1
    monkeypatch.setenv("AMCT_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("AMCT_LOG_FILE_LEVEL", value)
    log.start("amct_caffe")
    say_everything()
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert len((tmp_path / "amct_log" / "amct_caffe.log").read_text().splitlines()) == 1 + shown


@pytest.mark.parametrize("variable", ["AMCT_LOG_LEVEL", "AMCT_LOG_FILE_LEVEL"])
@pytest.mark.parametrize("value", ["VERBOSE", "10", "CRITICAL"])
def test_wrong_level(monkeypatch, tmp_path, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentError, match=f"{variable} must be one of DEBUG, INFO, WARNING, ERROR .*, got '{value}'"):
        log.start("amct_pytorch")
    with pytest.raises(ValueError, match=variable):
        log.screen_level() if variable == "AMCT_LOG_LEVEL" else log.file_level()
    assert issubclass(ArgumentError, AmctError)
    assert list(tmp_path.iterdir()) == []


def test_starting_again_duplicates_nothing(tmp_path, capsys):
    root_handlers = list(logging.getLogger().handlers)
    for _ in range(3):
        log.start("amct_pytorch")
    logger.info("once")
    assert capsys.readouterr().err == "[AMCT][INFO]once\n"
    assert (tmp_path / "amct_log" / "amct_pytorch.log").read_text().count("once") == 1
    assert len(logging.getLogger("amct").handlers) == 2
    assert logging.getLogger().handlers == root_handlers


@pytest.mark.parametrize(("level", "lines"), [(logging.NOTSET, []), (logging.WARNING, ["[AMCT][INFO]quiet"])])
def test_what_the_program_itself_shows_is_not_shown_twice(capsys, level, lines):
    """After ``logging.basicConfig()`` the root logger writes to standard error too."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(level)
    logging.getLogger().addHandler(shown)
    try:
        log.start("amct_pytorch")
        logger.info("quiet")
        logger.warning("loud")
    finally:
        logging.getLogger().removeHandler(shown)
    assert capsys.readouterr().err.splitlines() == (lines or ["quiet"]) + ["loud"]


def test_another_flow_and_another_folder_get_their_own_file(monkeypatch, tmp_path):
    log.start("amct_pytorch")
    logger.info("one")
    log.start("amct_caffe")
    logger.info("two")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log.start("amct_caffe")
    logger.info("three")
    monkeypatch.chdir(tmp_path)
    log.start("amct_pytorch")
    logger.info("four")
    found = {
        path.relative_to(tmp_path).as_posix(): [line.split(": ")[-1] for line in path.read_text().splitlines()]
        for path in tmp_path.rglob("*.log")
    }
    assert found == {
        "amct_log/amct_pytorch.log": ["one", "four"],
        "amct_log/amct_caffe.log": ["two"],
        "elsewhere/amct_log/amct_caffe.log": ["three"],
    }


def test_a_deleted_log_file_comes_back_with_the_next_start(tmp_path):
    log.start("amct_pytorch")
    logger.info("first")
    path = tmp_path / "amct_log" / "amct_pytorch.log"
    path.unlink()
    path.parent.rmdir()
    log.start("amct_pytorch")
    logger.info("again")
    assert "again" in path.read_text()


def test_the_first_line_creates_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_FILE_LEVEL", "WARNING")
    log.start("amct_pytorch")
    logger.info("below the level of the file")
    assert list(tmp_path.iterdir()) == []
    logger.warning("written")
    assert "written" in (tmp_path / "amct_log" / "amct_pytorch.log").read_text()


def test_screen_only_opens_no_file(tmp_path, capsys):
    @log.screen_only()
    def own_function():
        log.start("amct_caffe")  # as an AMCT step inside one of our functions does
        logger.info("shown")

    own_function()
    logger.info("shown too")
    assert capsys.readouterr().err == "[AMCT][INFO]shown\n[AMCT][INFO]shown too\n"
    assert list(tmp_path.iterdir()) == []
    log.start("amct_caffe")
    logger.info("written")
    with log.screen_only():  # does not close the file of a flow that has one
        logger.info("written too")
    assert (tmp_path / "amct_log" / "amct_caffe.log").read_text().count("written") == 2


def test_tags_in_a_message_are_not_interpreted(tmp_path, capsys):
    log.start("amct_pytorch")
    logger.info("[bold]%s[/bold] [red]卷积[/] 100%% \N{SNOWMAN}", "layer[0]")
    assert capsys.readouterr().err == "[AMCT][INFO][bold]layer[0][/bold] [red]卷积[/] 100% ☃\n"
    assert "[bold]layer[0][/bold] [red]卷积[/]" in (tmp_path / "amct_log" / "amct_pytorch.log").read_text("utf-8")


def test_an_unwritable_folder_is_a_warning(tmp_path, capsys):
    (tmp_path / "amct_log").write_text("a file where the folder should be")
    log.start("amct_pytorch")
    logger.info("first")
    screen = capsys.readouterr().err
    assert "[AMCT][INFO]first\n" in screen
    assert "[AMCT][WARNING]no log file: " in screen
    logger.info("still here")
    assert capsys.readouterr().err == "[AMCT][INFO]still here\n"
    assert len(logging.getLogger("amct").handlers) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_said_once(tmp_path, capsys):
    (tmp_path / "amct_log").mkdir()
    (tmp_path / "amct_log" / "amct_pytorch.log").symlink_to("/dev/full")
    log.start("amct_pytorch")
    logger.info("first")
    logger.info("second")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("[AMCT][WARNING]")] == [
        "[AMCT][INFO]first",
        "[AMCT][INFO]second",
    ]
    assert len(lines) == 3
    assert "cannot be written" in "".join(lines)


def test_no_standard_error_is_no_trouble(monkeypatch, tmp_path):
    log.start("amct_pytorch")
    monkeypatch.setattr(sys, "stderr", None)
    logger.error("into the file only")
    assert "into the file only" in (tmp_path / "amct_log" / "amct_pytorch.log").read_text()


def test_other_peoples_handlers_still_hear_ours(caplog):
    log.start("amct_pytorch")
    with caplog.at_level(logging.INFO):
        logger.info("heard")
    assert caplog.messages == ["heard"]


def test_importing_writes_and_creates_nothing(tmp_path):
    program = "import logging, amct, amct.log, amct.log, amct.schema; print(logging.getLogger().handlers)"
    environment = {**os.environ, "AMCT_LOG_LEVEL": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_started_flow_in_a_fresh_process(tmp_path):
    program = """
import logging
from amct import log
log.start("amct_caffe")
logging.getLogger("amct.caffe.net").info("Do layer %s activation calibration success!", "conv1")
assert logging.getLogger().handlers == []
assert logging.getLogger().level == logging.WARNING
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "[AMCT][INFO]Do layer conv1 activation calibration success!\n"
    assert [path.name for path in (tmp_path / "amct_log").iterdir()] == ["amct_caffe.log"]
