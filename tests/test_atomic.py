from __future__ import annotations

import json
import os
import random
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from amct import atomic
from amct.errors import ArgumentError, FileError
from atomic_writer import generation_bytes, write_generation

WRITER = Path(__file__).with_name("atomic_writer.py")


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*"))


def usual_mode(folder):
    """That of a file which any other program makes there."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "f").touch()
        return mode(Path(place) / "f")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(WRITER), program, *map(str, arguments)], stdout=subprocess.PIPE)


# ---------------------------------------------------------------------------------------------------------- one file


def test_writes_text_bytes_and_streams(tmp_path):
    atomic.write_text(tmp_path / "t", "ä\r\n")
    atomic.write_bytes(tmp_path / "b", b"\x00\xff")
    with atomic.open_write(tmp_path / "s") as stream:
        stream.write(b"one ")
        stream.write(b"two")
    assert (tmp_path / "t").read_bytes() == "ä\r\n".encode()
    assert atomic.read_bytes(str(tmp_path / "b")) == b"\x00\xff"
    assert atomic.read_bytes(tmp_path / "s") == b"one two"
    assert hidden(tmp_path) == []


MODES = """
import os, sys
from pathlib import Path
from amct import atomic
if sys.argv[2] == "call":
    atomic._disk._STATUS = Path("/nonexistent")
os.umask(int(sys.argv[1], 8))
Path("old").write_text("old")
Path("old").chmod(0o666)
atomic.write_text("old", "new")
atomic.modify("changed", lambda content: b"x")
with atomic.FileGroup() as group:
    group.write_text("new/deep/f", "x")
    path = group.path("library")
    path.write_text("x")
    path.chmod(0o400)
    with group.open("stream") as stream:
        wide = [each.name for each in Path().rglob("*") if each.is_file() and each.stat().st_mode & int(sys.argv[1], 8)]
assert os.umask(0o022) == int(sys.argv[1], 8)
names = ("old", "changed", "new/deep/f", "library", "stream", "new", "new/deep")
print(*(oct(Path(name).stat().st_mode & 0o777) for name in names), wide)
"""


@pytest.mark.parametrize("told_by", ["status", "call"])
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_files_and_folders_have_the_mode_that_the_umask_leaves(tmp_path, mask, told_by):
    command = [sys.executable, "-c", MODES, oct(mask), told_by]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, folder = oct(0o666 & ~mask), oct(0o777 & ~mask)
    assert done.stdout.split() == [*[file] * 5, *[folder] * 2, "[]"]


def test_a_raising_block_leaves_the_old_file_and_no_new_folder(tmp_path):
    (tmp_path / "f").write_text("old")

    def write_half(path: Path) -> None:
        with atomic.open_write(path) as stream:
            stream.write(b"half")
            raise ZeroDivisionError

    for path in (tmp_path / "f", tmp_path / "new" / "deep" / "g"):
        with pytest.raises(ZeroDivisionError):
            write_half(path)
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_a_symbolic_link_is_replaced_and_its_target_stays(tmp_path, caplog, kind):
    target = tmp_path / "home" / "f"
    target.parent.mkdir()
    if kind == "file":
        target.write_text("mine")
    for write in (
        atomic.write_text,
        lambda path, text: atomic.modify(path, lambda _: text.encode()),
        lambda path, text: atomic.replace_fleeting(path, text.encode()),
    ):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(target)
        caplog.clear()
        write(tmp_path / "link", "new")
        assert not (tmp_path / "link").is_symlink()
        assert (tmp_path / "link").read_text() == "new"
        assert [path.name for path in target.parent.iterdir()] == (["f"] if kind == "file" else [])
        assert kind == "nothing" or target.read_text() == "mine"
        assert "is a link and is replaced by a file" in caplog.text
    assert hidden(tmp_path) == []


def test_links_to_folders_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    atomic.write_text(tmp_path / "link" / "f", "text")
    assert (tmp_path / "real" / "f").read_text() == "text"
    with pytest.raises(FileError, match="it is a folder"):
        atomic.write_text(tmp_path / "link", "text")


def test_a_link_that_an_interrupted_save_would_have_replaced_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("old")
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere" / "a")
    plant_notice(tmp_path, "a", "b")
    with pytest.raises(FileError, match="was interrupted"):
        atomic.read_bytes(tmp_path / "a")


def test_a_name_of_255_bytes_can_be_written(tmp_path):
    name = "n" + "." + "x" * 253
    atomic.write_text(tmp_path / name, "x")
    assert (tmp_path / name).read_text() == "x"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "it is a folder; give the name of a file"),
        (lambda path: os.mkfifo(path), "it is a device or a pipe"),
        (lambda path: path.symlink_to(path), "symbolic links lead back to themselves"),
        (lambda path: path.symlink_to("/dev/null"), "it is a device or a pipe"),
    ],
    ids=["folder", "pipe", "loop", "device"],
)
def test_targets_that_cannot_be_replaced(tmp_path, make, message):
    make(tmp_path / "target")
    with pytest.raises(FileError, match=message) as caught:
        atomic.write_text(tmp_path / "target", "new")
    assert str(tmp_path / "target") in str(caught.value)
    with pytest.raises(FileError, match=message):
        atomic.modify(tmp_path / "target", lambda _: b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_file_that_this_user_may_not_write_stays(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as the system answers; for root a mode of 444 says nothing
    with pytest.raises(FileError, match="it is read-only; remove it or allow writing"):
        atomic.write_text(target, "new")
    assert target.read_text() == "old"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/proc/amct_x/f", 'cannot create folder "/proc/amct_x"'),
        ("/dev/null/f", "not a directory"),
        ("nul\0byte", "cannot use .*null"),
        ("x" * 300, "file name too long; choose a shorter name"),
    ],
    ids=["proc", "below a device", "nul", "long"],
)
def test_impossible_paths(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=message):
        atomic.write_text(path, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    # A limit on the size of files stands for the full disk: the same write fails in the same place.
    (tmp_path / "f").write_text("old")
    code = (
        "import resource, signal, sys\n"
        "from amct import atomic\n"
        "from amct.errors import FileError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    atomic.write_bytes(sys.argv[1], bytes(5000))\n"
        "except FileError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], capture_output=True, text=True, check=True)
    assert done.stdout == f'cannot write "{tmp_path / "f"}": file too large\n'
    assert (tmp_path / "f").read_text() == "old"
    assert hidden(tmp_path) == []


def test_an_error_about_another_file_is_not_renamed(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic.open_write(tmp_path / "f"):
        (tmp_path / "elsewhere").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_reading_what_is_not_there(tmp_path):
    (tmp_path / "record.txt").write_text("")
    with pytest.raises(FileError, match=r'"record.txt"\?') as caught:
        atomic.read_bytes(tmp_path / "recrd.txt")
    assert isinstance(caught.value, OSError)
    with pytest.raises(FileError, match="is a directory"):
        atomic.read_bytes(tmp_path)
    with pytest.raises(FileError, match="does not exist"):
        atomic.read_bytes(tmp_path / "no" / "such" / "file")


def test_check_writable(tmp_path):
    atomic.check_writable(tmp_path)
    atomic.check_writable(tmp_path / "not" / "yet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for bad in ("/proc/amct_x", "/proc", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileError, match="cannot write to folder"):
            atomic.check_writable(bad)


# ------------------------------------------------------------------------------------------------------------ groups


def test_a_group_appears_at_the_end_of_its_block(tmp_path):
    with atomic.FileGroup() as group:
        group.write_text(tmp_path / "a", "A")
        with group.open(tmp_path / "sub" / "b") as stream:
            stream.write(b"B")
        library_path = group.path(tmp_path / "c.onnx")
        assert library_path.suffix == ".onnx"
        assert library_path.parent == tmp_path
        library_path.write_text("C")
        assert not (tmp_path / "a").exists()
        assert not (tmp_path / "sub" / "b").exists()
    assert [(tmp_path / name).read_text() for name in ("a", "sub/b", "c.onnx")] == ["A", "B", "C"]
    assert mode(tmp_path / "c.onnx") == usual_mode(tmp_path)
    assert hidden(tmp_path) == []


def test_an_empty_group_does_nothing(tmp_path):
    with atomic.FileGroup():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_raising_group_leaves_nothing(tmp_path, error):
    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "sub" / "a", "A")
            group.path(tmp_path / "b").write_text("B")
            group.path(tmp_path / "never")
            raise error

    with pytest.raises(error):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_failed_spoils_its_group_even_if_the_error_is_swallowed(tmp_path):
    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "a", "A")
            with suppress(ZeroDivisionError), group.open(tmp_path / "b"):
                raise ZeroDivisionError

    with pytest.raises(FileError, match="not completely written, so none of its group is"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_promised_file_must_be_written(tmp_path):
    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "a", "A")
            group.path(tmp_path / "b")

    with pytest.raises(FileError, match='b" was announced but never written'):
        write()
    assert list(tmp_path.iterdir()) == []


def test_misused_groups(tmp_path):
    with pytest.raises(ArgumentError, match="inside its with block"):
        atomic.FileGroup().path(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path)

    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "a", "A")
            group.write_text(tmp_path / "link" / "a", "B")

    with pytest.raises(ArgumentError, match="already in this group"):
        write()
    assert hidden(tmp_path) == []


def test_a_target_that_became_a_folder_stops_the_whole_group(tmp_path):
    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "a", "A")
            group.write_text(tmp_path / "b", "B")
            (tmp_path / "b").mkdir()

    with pytest.raises(FileError, match="it is a folder"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_the_group_may_contain_a_file_that_its_library_wrote_read_only(tmp_path):
    with atomic.FileGroup() as group:
        path = group.path(tmp_path / "a.h5")
        path.write_text("A")
        path.chmod(0o400)
        group.write_text(tmp_path / "b", "B")
    assert mode(tmp_path / "a.h5") == usual_mode(tmp_path)


# --------------------------------------------------------------------------------------- leftovers of killed writers


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def hidden_name(folder: Path, ending: str, *, machine: str = "", pid: int | None = None, start: int = 1) -> Path:
    """A hidden name as a process would give it: by default one that is dead."""
    with atomic.open_write(folder / "probe"):
        (name,) = [name for name in hidden(folder) if f"-{os.getpid()}-" in name]
    (folder / "probe").unlink()
    here = name.removeprefix(".amct-").split("-")[0]
    token = secrets.token_hex(6)
    return folder / f".amct-{machine or here}-{dead_pid() if pid is None else pid}-{start}-{token}.{ending}"


def own_start() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def plant_notice(folder: Path, *names: str, **who: Any) -> Path:
    notice = hidden_name(folder, "journal", **who)
    notice.write_text(json.dumps({"version": 2, "files": names}))
    return notice


def test_a_living_writers_temporary_file_is_left_alone(tmp_path):
    with atomic.open_write(tmp_path / "f") as stream:
        stream.write(b"x")
        (name,) = hidden(tmp_path)
        atomic.write_text(tmp_path / "g", "")
        code = f"from amct import atomic; atomic.write_text({str(tmp_path / 'h')!r}, '')"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert hidden(tmp_path) == [name]
    assert (tmp_path / "f").read_bytes() == b"x"


@pytest.mark.parametrize("write", [atomic.write_bytes, lambda path, data: atomic.modify(path, lambda _: data)])
def test_temporary_files_of_the_dead_and_of_reused_pids_go_at_the_next_write(tmp_path, write):
    foreign = "00000000"
    gone = [
        hidden_name(tmp_path, "tmp"),
        hidden_name(tmp_path, "tmp.onnx", pid=os.getpid(), start=own_start() - 1),
        hidden_name(tmp_path, "tmp", machine=foreign),
    ]
    kept = [
        hidden_name(tmp_path, "tmp", machine=foreign),
        hidden_name(tmp_path, "tmpfile"),
        hidden_name(tmp_path, "tmp." + "x" * 40),
        hidden_name(tmp_path, "pointer"),
        tmp_path / ".amct-mine",
    ]
    for leftover in (*gone, *kept):
        leftover.write_text("")
    two_days_ago = time.time() - 2 * 86400
    os.utime(gone[-1], (two_days_ago, two_days_ago))
    (tmp_path / "other").write_text("not ours")
    assert atomic.read_bytes(tmp_path / "other") == b"not ours"
    assert len(hidden(tmp_path)) == len(gone) + len(kept)  # reading removes nothing
    write(tmp_path / "f", b"x")
    assert hidden(tmp_path) == sorted(path.name for path in kept)


def test_only_regular_files_of_this_user_are_removed(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("precious")
    hidden_name(folder, "tmp").symlink_to(tmp_path / "outside")
    hidden_name(folder, "tmp").mkdir()
    os.mkfifo(hidden_name(folder, "tmp"))
    before = hidden(folder)
    atomic.write_text(folder / "f", "x")
    assert hidden(folder) == before
    regular = hidden_name(folder, "tmp")
    regular.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    atomic.write_text(folder / "f", "x")
    assert regular.exists()
    assert (tmp_path / "outside").read_text() == "precious"


# ----------------------------------------------------------------------------------------------------------- notices


def write_two(folder: Path, text: str) -> None:
    with atomic.FileGroup() as group:
        group.write_text(folder / "a", text)
        group.write_text(folder / "b", text)


def test_files_of_an_interrupted_save_are_refused_until_it_ran_again(tmp_path):
    write_two(tmp_path, "old")
    atomic.write_text(tmp_path / "other", "fine")
    notice = plant_notice(tmp_path, "a", "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for name in ("a", "b", "link"):
        with pytest.raises(FileError, match=r"was interrupted.*Run that save again.*remove") as caught:
            atomic.read_bytes(tmp_path / name)
        assert str(notice) in str(caught.value)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(FileError, match=r'save that writes it together with "a" was interrupted'):
        atomic.modify(tmp_path / "b", lambda _: b"new")
    with pytest.raises(FileError, match="was interrupted"):
        atomic.check_whole(tmp_path / "other", tmp_path / "b")
    assert atomic.read_bytes(tmp_path / "other") == b"fine"
    assert [(tmp_path / name).read_text() for name in "ab"] == ["old", "old"]
    assert hidden(tmp_path) == [notice.name]
    write_two(tmp_path, "new")
    assert atomic.read_bytes(tmp_path / "a") == atomic.read_bytes(tmp_path / "b") == b"new"
    assert hidden(tmp_path) == []


def test_a_save_of_some_files_leaves_the_others_noticed(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("old")
    notice = plant_notice(tmp_path, "a", "b", "c", "never written")
    write_two(tmp_path, "new")
    assert atomic.read_bytes(tmp_path / "a") == b"new"
    assert json.loads(notice.read_text()) == {"version": 2, "files": ["c"]}
    with pytest.raises(FileError, match="was interrupted"):
        atomic.read_bytes(tmp_path / "c")
    atomic.write_text(tmp_path / "c", "new")
    assert atomic.read_bytes(tmp_path / "c") == b"new"
    assert hidden(tmp_path) == []


def test_a_notice_of_another_user_is_never_changed(tmp_path, monkeypatch, caplog):
    write_two(tmp_path, "old")
    notice = plant_notice(tmp_path, "a", "b")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    write_two(tmp_path, "new")
    assert hidden(tmp_path) == [notice.name]
    assert "belongs to another user; remove it" in caplog.text


def test_a_reader_waits_for_a_living_writer(tmp_path, monkeypatch):
    write_two(tmp_path, "old")
    notice = plant_notice(tmp_path, "a", "b", pid=os.getpid(), start=own_start())
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            notice.unlink()

    monkeypatch.setattr("amct.atomic._group.time.sleep", wait)
    assert atomic.read_bytes(tmp_path / "a") == b"old"
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ({"pid": os.getpid(), "start": own_start()}, "has been running for more than 0 seconds, or failed"),
        ({"machine": "00000000"}, "was interrupted, or is still running on another machine"),
    ],
    ids=["living", "foreign"],
)
def test_a_reader_does_not_wait_forever(tmp_path, monkeypatch, who, message):
    monkeypatch.setattr("amct.atomic._group._PATIENCE_SECONDS", 0.05)
    write_two(tmp_path, "old")
    plant_notice(tmp_path, "a", "b", **who)
    with pytest.raises(FileError, match=message):
        atomic.read_bytes(tmp_path / "a")
    write_two(tmp_path, "new")
    assert atomic.read_bytes(tmp_path / "a") == b"new"
    assert hidden(tmp_path) == []


def fifo(path: Path) -> None:
    os.mkfifo(path)


def without_access_time(path: Path) -> tuple[int, ...]:
    """What a write or a rename would change; reading a file sets the access time too."""
    about = path.lstat()
    return (
        about.st_mode,
        about.st_ino,
        about.st_nlink,
        about.st_uid,
        about.st_size,
        about.st_mtime_ns,
        about.st_ctime_ns,
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text("no json"), "it is not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\xff"), "it is not JSON"),
        (lambda path: path.write_text("[" * 100_000), "it is not JSON"),
        (lambda path: path.write_text("9" * 10_000), "it is not"),
        (lambda path: path.write_text('{"version": 2}'), "not of version 2"),
        (lambda path: path.write_text('{"version": 1, "files": ["f"]}'), "not of version 2"),
        (lambda path: path.write_text('{"files": [["t", "f"]], "pointers": []}'), "not of version 2"),
        (lambda path: path.write_text('{"version": 2, "files": "f"}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", "../f"]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", ".."]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", "/f"]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", "\\u0000"]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", "\\ud800"]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f", ["f"]]}'), "plain names"),
        (lambda path: path.write_text('{"version": 2, "files": ["f"]}' + " " * (1 << 20)), "too large"),
        (lambda path: path.symlink_to(path.parent / "looks like one"), "cannot be read"),
        (lambda path: path.mkdir(), "not a regular file"),
        (fifo, "not a regular file"),
    ],
)
def test_a_notice_of_another_form_is_left_alone_with_one_warning(tmp_path, make, reason, caplog):
    atomic.write_text(tmp_path / "f", "old")
    (tmp_path / "looks like one").write_text('{"version": 2, "files": ["f"]}')
    notice = hidden_name(tmp_path, "journal")
    make(notice)
    before = without_access_time(notice)
    for _ in range(3):
        assert atomic.read_bytes(tmp_path / "f") == b"old"
    write_two(tmp_path, "new")
    atomic.write_text(tmp_path / "f", "new")
    atomic.modify(tmp_path / "f", lambda content: (content or b"") + b"er")
    assert atomic.read_bytes(tmp_path / "f") == b"newer"
    assert without_access_time(notice) == before
    assert len(caplog.records) == 1
    assert str(notice) in caplog.text
    assert "is left alone" in caplog.text
    assert reason in caplog.text


def test_hidden_and_odd_names_are_noticed_too(tmp_path):
    names = [".record", "ä ö", 'quo"te', "back\\slash", os.fsdecode(b"not utf-8 \xff"), "n" * 255]
    plant_notice(tmp_path, *names)
    for name in names:
        with pytest.raises(FileError, match="was interrupted"):
            atomic.check_whole(tmp_path / name)


def test_a_rename_that_fails_in_the_middle_is_noticed_and_the_first_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("amct.atomic._group._PATIENCE_SECONDS", 0.05)
    write_two(tmp_path, "old")
    replace = os.replace

    def failing_at(name: str) -> None:
        def guarded(source: Any, target: Any) -> None:
            if Path(target).name == name:
                raise OSError(5, "Input/output error")
            replace(source, target)

        monkeypatch.setattr(os, "replace", guarded)

    failing_at("a")
    with pytest.raises(FileError, match=r'cannot finish the write of ".*/a"'):
        write_two(tmp_path, "new")
    assert hidden(tmp_path) == []
    assert atomic.read_bytes(tmp_path / "a") == atomic.read_bytes(tmp_path / "b") == b"old"
    failing_at("b")
    with pytest.raises(FileError, match=r'cannot finish the write of ".*/b"'):
        write_two(tmp_path, "new")
    assert [name[-8:] for name in hidden(tmp_path)] == [".journal"]
    for name in "ab":
        with pytest.raises(FileError, match="or failed"):
            atomic.read_bytes(tmp_path / name)
    failing_at("")
    write_two(tmp_path, "newer")
    assert atomic.read_bytes(tmp_path / "a") == atomic.read_bytes(tmp_path / "b") == b"newer"
    assert hidden(tmp_path) == []


def test_ctrl_c_between_the_renames_finishes_them(tmp_path, monkeypatch):
    replace = os.replace
    interrupts = [KeyboardInterrupt]

    def interrupted(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target).name == "a" and interrupts:
            raise interrupts.pop()

    write_two(tmp_path, "old")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_two(tmp_path, "new")
    assert atomic.read_bytes(tmp_path / "a") == atomic.read_bytes(tmp_path / "b") == b"new"
    assert hidden(tmp_path) == []


def test_the_notice_lists_the_group_before_any_rename_and_quant_json_comes_last(tmp_path, monkeypatch):
    replace = os.replace
    seen = []

    def watched(source: Any, target: Any) -> None:
        if not Path(target).name.startswith("."):
            notices = {name: path.read_text() for path in tmp_path.rglob("*.journal") for name in [path.parent.name]}
            seen.append((Path(target).name, notices))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with atomic.FileGroup() as group:
        for name in ("one/net_quant.json", "one/net.onnx", "two/record.txt"):
            group.write_text(tmp_path / name, "x")
    assert [name for name, _ in seen] == ["net.onnx", "record.txt", "net_quant.json"]
    for _, notices in seen:
        assert {folder: set(json.loads(text)["files"]) for folder, text in notices.items()} == {
            "one": {"net.onnx", "net_quant.json"},
            "two": {"record.txt"},
        }
    assert hidden(tmp_path) == []


def test_a_single_file_costs_three_syncs(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "f").write_text("old")
    with atomic.open_write(tmp_path / "f") as stream:
        stream.write(b"new")
    assert len(synced) == 3  # the file, at its end and when the group is complete; the folder


def test_a_group_without_a_writable_notice_changes_nothing(tmp_path, monkeypatch):
    write_two(tmp_path, "old")

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("amct.atomic._group.json.dumps", full)
    with pytest.raises(FileError, match="no space left on device; free some space"):
        write_two(tmp_path, "new")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["old", "old"]
    assert hidden(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------- locks


@pytest.mark.parametrize("content", ["", "export PATH\n"])
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "dangling link", "folder", "pipe", "file"])
def test_what_has_the_name_of_the_lock_but_is_none_is_never_touched(tmp_path, monkeypatch, kind, content):
    monkeypatch.setattr("amct.atomic._disk._CONTENT_PATIENCE_SECONDS", 0.05)
    folder, outside = tmp_path / "folder", tmp_path / ".bashrc"
    folder.mkdir()
    outside.write_text(content)
    lock = folder / ".amct.lock"
    {
        "symbolic link": lambda: lock.symlink_to(outside),
        "hard link": lambda: lock.hardlink_to(outside),
        "dangling link": lambda: lock.symlink_to(tmp_path / "made"),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
        "file": lambda: lock.write_text(content),
    }[kind]()
    (folder / "f").write_text("old")
    assert atomic.read_bytes(folder / "f") == b"old"
    if kind in ("hard link", "file") and not content:
        atomic.write_text(folder / "f", "new")
        assert hidden(folder) == []
    else:
        for write in (
            lambda: atomic.write_text(folder / "f", "new"),
            lambda: atomic.modify(folder / "f", lambda _: b""),
        ):
            with pytest.raises(FileError, match=r'".*/\.amct\.lock" is a .* remove it and run this again'):
                write()
        assert hidden(folder) == [".amct.lock"]
        assert (folder / "f").read_text() == "old"
    assert outside.read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == [".bashrc", "folder"]


def test_a_lock_file_left_by_a_killed_process_goes(tmp_path):
    (tmp_path / ".amct.lock").write_text("")
    atomic.write_text(tmp_path / "f", "x")
    assert hidden(tmp_path) == []


def test_a_lock_that_is_never_released_ends_in_an_error(tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("amct.atomic._disk._LOCK_PATIENCE_SECONDS", 0.05)
    held = threading.Event()
    release = threading.Event()

    def hold():
        with FileLock(tmp_path / ".amct.lock"):
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with pytest.raises(FileError, match=r"locked by another process .*end that process"):
            atomic.write_text(tmp_path / "f", "x")
    finally:
        release.set()
        holder.join()


# ------------------------------------------------------------------------------------------------------------- kills


def test_a_kill_at_every_single_step_leaves_the_old_group_or_the_new_one_or_a_noticed_mixture(tmp_path):
    process = start("crash", tmp_path)
    output, _ = process.communicate()
    *lines, last = output.decode().splitlines()
    assert process.returncode == 0
    assert last == "done"
    states = [line.split() for line in lines]
    whole = {"old+old+old", "new+new+new"}
    for step, disk, read, after, leftovers in states:
        assert (read == disk and read in whole) or "refused" in read, f"step {step}: {disk} was read as {read}"
        assert disk in whole or read == "refused+refused+refused", f"step {step}: {disk} was read as {read}"
        assert after == "next+next+next"
        assert leftovers == "-"
    assert {read for _, _, read, _, _ in states} >= {*whole, "refused+refused+refused"}
    # Some kills fell between two renames.
    assert any(disk not in whole for _, disk, _, _, _ in states)
    assert len(states) > 40


def is_refused(path: Path) -> bool:
    try:
        atomic.check_whole(path)
    except FileError as error:
        if "was interrupted" in str(error):
            return True
        raise
    return False


def generation_read(folder: Path, count: int, size: int) -> int | None:
    """The generation that every file of the group has, whole; None when the group is refused as a mixture."""
    before = sorted(os.listdir(folder))  # noqa: PTH208 - names only: faster
    refused = sum(is_refused(folder / f"file{index}.bin") for index in range(count))
    assert sorted(os.listdir(folder)) == before  # noqa: PTH208
    if refused == count:
        return None
    # Some may be refused: the kill fell between two notices of a large group, before the first rename.
    (content,) = {(folder / f"file{index}.bin").read_bytes() for index in range(count)}
    assert content == generation_bytes(int(content[:8]), size)
    return int(content[:8])


def test_sigkill_while_writing_a_group_of_50_megabytes(tmp_path):
    count, size = 6, 9_000_000
    write_generation(tmp_path, count, size, 0)
    generator = random.Random(2)
    landed = 0
    longest = 0.5
    for _ in range(150):
        if landed >= 25:
            break
        process = start("group", tmp_path, count, size)
        assert process.stdout is not None
        process.stdout.readline()  # the first generation begins now
        time.sleep(generator.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        # A temporary file is the proof: its group was opened, and its last rename had not happened.
        landed += any(".tmp" in name for name in hidden(tmp_path))
        generation_read(tmp_path, count, size)
        assert len([path for path in tmp_path.iterdir() if path.name.startswith("file")]) == count
    assert landed >= 25
    write_generation(tmp_path, count, size, 7)
    assert generation_read(tmp_path, count, size) == 7
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("renames", [1, 510])
def test_sigkill_between_the_renames(tmp_path, renames):
    count, size = 520, 8  # more than one notice lists
    write_generation(tmp_path, count, size, 0)
    assert hidden(tmp_path) == []
    process = start("stopped", tmp_path, count, size, renames)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sum(".tmp" in name for name in hidden(tmp_path)) == count - renames
    assert generation_read(tmp_path, count, size) is None
    write_generation(tmp_path, count, size, 2)
    assert generation_read(tmp_path, count, size) == 2
    assert hidden(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ modify


def test_a_fleeting_file_is_replaced_as_a_whole_though_others_hold_the_lock(tmp_path):
    path = tmp_path / "new" / "f"
    atomic.replace_fleeting(path, b"old")
    atomic.modify(path.parent / "g", lambda _: atomic.replace_fleeting(path, b"new") or b"")
    assert path.read_bytes() == b"new"
    assert mode(path) == usual_mode(tmp_path)
    with pytest.raises(FileError, match="it is a folder"):
        atomic.replace_fleeting(path.parent, b"")
    assert hidden(path.parent) == []


def test_modify_creates_changes_and_leaves_alone(tmp_path):
    path = tmp_path / "new" / "f"
    atomic.modify(path, lambda content: b"1" if content is None else b"wrong")
    atomic.modify(path, lambda content: (content or b"") + b"2")
    assert path.read_bytes() == b"12"
    assert mode(path) == usual_mode(tmp_path)
    inode = path.stat().st_ino
    atomic.modify(path, lambda content: content or b"")
    assert path.stat().st_ino == inode
    with pytest.raises(ZeroDivisionError):
        atomic.modify(path, lambda _: bytes(1 // 0))
    assert path.read_bytes() == b"12"
    assert hidden(tmp_path) == []


def test_modify_from_many_threads_loses_nothing(tmp_path):
    path = tmp_path / "count"

    def add() -> None:
        for _ in range(25):
            atomic.modify(path, lambda content: b"%d" % (int(content or b"0") + 1))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == b"200"
    assert hidden(tmp_path) == []


def test_a_save_between_the_reads_of_two_files_is_noticed(tmp_path):
    write_two(tmp_path, "old")
    files = atomic.Snapshot(tmp_path / "a", tmp_path / "b")
    files.check_unchanged()
    first = atomic.read_bytes(tmp_path / "a")
    write_two(tmp_path, "new")
    assert (first, atomic.read_bytes(tmp_path / "b")) == (b"old", b"new")
    with pytest.raises(FileError, match=r'a" was written by another process while it was read; run this again'):
        files.check_unchanged()
    files = atomic.Snapshot(tmp_path / "a", tmp_path / "missing")
    plant_notice(tmp_path, "a", "b")
    with pytest.raises(FileError, match="was interrupted"):
        files.check_unchanged()
