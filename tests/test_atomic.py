from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from amct import atomic
from amct.errors import ArgumentError, FileError
from atomic_writer import generation_bytes, write_generation

WRITER = Path(__file__).with_name("atomic_writer.py")


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*"))


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


def test_files_get_mode_640_and_new_folders_750_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        atomic.write_text(tmp_path / "new" / "deep" / "f", "x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == mode(tmp_path / "new" / "deep") == 0o750
    assert mode(tmp_path / "new" / "deep" / "f") == 0o640


def test_an_overwritten_file_gets_mode_640_too(tmp_path):
    (tmp_path / "f").write_text("old")
    (tmp_path / "f").chmod(0o666)
    atomic.write_text(tmp_path / "f", "new")
    assert mode(tmp_path / "f") == 0o640


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


def test_a_symbolic_link_stays_a_link_and_its_target_changes(tmp_path):
    target = tmp_path / "real" / "f"
    target.parent.mkdir()
    (tmp_path / "link").symlink_to(target)
    atomic.write_text(tmp_path / "link", "first")  # dangling before
    atomic.write_text(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert target.read_text() == "second"
    assert hidden(tmp_path) == []


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
    ],
    ids=["folder", "pipe", "loop"],
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
    assert mode(tmp_path / "c.onnx") == 0o640
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
    (tmp_path / "link").symlink_to(tmp_path / "a")

    def write() -> None:
        with atomic.FileGroup() as group:
            group.write_text(tmp_path / "a", "A")
            group.write_text(tmp_path / "link", "B")

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
    assert mode(tmp_path / "a.h5") == 0o640


# ---------------------------------------------------------------------------------------------------------- recovery


def test_recover_of_a_missing_folder_or_one_without_leftovers_does_nothing(tmp_path):
    atomic.recover(tmp_path / "nowhere")
    (tmp_path / ".amct-mine").write_text("a user's file that only looks like ours")
    atomic.recover(tmp_path)
    assert hidden(tmp_path) == [".amct-mine"]


def test_a_living_writers_temporary_file_is_left_alone(tmp_path):
    with atomic.open_write(tmp_path / "f") as stream:
        stream.write(b"x")
        (name,) = hidden(tmp_path)
        atomic.recover(tmp_path)
        code = f"from amct import atomic; atomic.recover({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert hidden(tmp_path) == [name]
    assert (tmp_path / "f").read_bytes() == b"x"


def test_temporary_files_of_the_dead_and_of_reused_pids_go(tmp_path):
    with atomic.open_write(tmp_path / "f"):
        (name,) = hidden(tmp_path)
    machine, pid, started, token = name.removeprefix(".amct-").removesuffix(".tmp").split("-")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    foreign = "00000000" if machine != "00000000" else "11111111"
    gone = [f".amct-{machine}-{dead.pid}-1-{token}.tmp", f".amct-{machine}-{pid}-{int(started) - 1}-{token}.tmp.onnx"]
    kept = f".amct-{foreign}-{dead.pid}-1-{token}.tmp"
    aged = f".amct-{foreign}-{dead.pid}-2-{token}.tmp"
    for leftover in (*gone, kept, aged):
        (tmp_path / leftover).write_text("")
    two_days_ago = time.time() - 2 * 86400
    os.utime(tmp_path / aged, (two_days_ago, two_days_ago))
    atomic.recover(tmp_path)
    assert hidden(tmp_path) == [kept]


def test_a_strange_journal_is_an_error_that_names_it(tmp_path):
    with atomic.open_write(tmp_path / "f"):
        (name,) = hidden(tmp_path)
    journal = tmp_path / name.replace(".tmp", ".journal")
    for content in ("not json", "{}", '{"files": [1], "pointers": []}'):
        journal.write_text(content)
        with pytest.raises(FileError, match="is not a journal of ours; remove it"):
            atomic.read_bytes(tmp_path / "f")


def test_a_lock_file_left_by_a_killed_process_goes(tmp_path):
    (tmp_path / ".amct.lock").write_text("")
    atomic.write_text(tmp_path / "f", "x")
    assert hidden(tmp_path) == []


def test_a_lock_that_is_never_released_ends_in_an_error(tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("amct.atomic._recovery._LOCK_PATIENCE_SECONDS", 0.05)
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


def test_a_kill_at_every_single_step_leaves_the_old_group_or_the_new_one(tmp_path):
    process = start("crash", tmp_path)
    output, _ = process.communicate()
    *lines, last = output.decode().splitlines()
    assert process.returncode == 0
    assert last == "done"
    states = [line.split() for line in lines]
    whole = {"old+old+old", "new+new+new"}
    for step, _, after, end, leftovers in states:
        assert after in whole, f"step {step}"
        assert end == after
        assert leftovers == "-"
    assert {after for _, _, after, _, _ in states} == whole
    # Some kills fell between two renames: then recover had something to do.
    assert any(before not in whole for _, before, _, _, _ in states)
    assert len(states) > 40


def whole_generation(folder: Path, count: int, size: int) -> int:
    """The generation that every file of the group has, whole."""
    generation = int((folder / "file0.bin").read_bytes()[:8])
    expected = generation_bytes(generation, size)
    for index in range(count):
        assert (folder / f"file{index}.bin").read_bytes() == expected
    return generation


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
        atomic.recover(tmp_path)
        whole_generation(tmp_path, count, size)
        assert hidden(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == count
    assert landed >= 25


def test_sigkill_between_the_renames(tmp_path):
    count, size = 500, 8
    landed = 0
    for _ in range(40):
        if landed >= 4:
            break
        process = start("unsynced", tmp_path, count, size)
        assert process.stdout is not None
        while not any(name.endswith(".journal") for name in os.listdir(tmp_path)):  # noqa: PTH208 - names only: faster
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        waiting = sum(".tmp" in name for name in hidden(tmp_path))
        landed += any(name.endswith(".journal") for name in hidden(tmp_path)) and 0 < waiting < count
        atomic.recover(tmp_path)
        whole_generation(tmp_path, count, size)
        assert hidden(tmp_path) == []
    assert landed >= 4


# ------------------------------------------------------------------------------------------------------------ modify


def test_modify_creates_changes_and_leaves_alone(tmp_path):
    path = tmp_path / "new" / "f"
    atomic.modify(path, lambda content: b"1" if content is None else b"wrong")
    atomic.modify(path, lambda content: (content or b"") + b"2")
    assert path.read_bytes() == b"12"
    assert mode(path) == 0o640
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
