"""The hidden file names used during writes, which identify the writing process.

They begin with ``.amct-<machine>-<pid>-<start time>-<token>``; the suffix is ``.tmp…`` for a file being written, and
``.journal`` for the notice that a group of files is being renamed. ``.amct.lock`` is the lock file of the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import stat
import sys
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

LOCK_NAME = ".amct.lock"
NOTICE = "journal"
TEMPORARY = "tmp"

_FOREIGN_AGE_SECONDS = 24 * 3600.0
_LONGEST_SUFFIX = 32
_NAME = re.compile(
    r"\.amct-(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-(?P<start>[0-9]{1,20})-[0-9a-f]{12}"
    rf"\.(?P<kind>{NOTICE}|{TEMPORARY})(?P<suffix>\.[^/]*)?"
)


class Writer(Enum):
    """The state of the process that created a hidden file."""

    ALIVE = "alive"
    DEAD = "dead"
    FOREIGN = "of another machine or container, whose processes cannot be seen from here"


def new_path(folder: Path, kind: str) -> Path:
    """Return a unique path in a folder; its name identifies this process."""
    return folder / f".amct-{_machine()}-{_this_process(os.getpid())}-{secrets.token_hex(6)}.{kind}"


def temporary_path(target: Path) -> Path:
    """Return a temporary path in the folder of a target, with its suffix, which some libraries need."""
    suffix = target.suffix if len(target.suffix.encode(errors="surrogateescape")) <= _LONGEST_SUFFIX else ""
    return new_path(target.parent, TEMPORARY + suffix)


def notice_names(folder: Path) -> list[str]:
    """Return the names of the notices in a folder; none if the folder does not exist or cannot be listed."""
    return [name for name in _names_in(folder) if _kind(name) == NOTICE]


def writer_of(name: str) -> Writer:
    """Return the state of the process that created a hidden file, from the file's name."""
    match = _NAME.fullmatch(name)
    if match is None or match["machine"] != _machine():
        return Writer.FOREIGN
    return Writer.ALIVE if _start_time(int(match["pid"])) == int(match["start"]) else Writer.DEAD


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of dead processes from a folder; only regular files of this user with our names."""
    writers: dict[str, Writer] = {}  # cached, because a group may have thousands of files of one process
    for name in _names_in(folder):
        if _kind(name) != TEMPORARY:
            continue
        writer = name.rpartition("-")[0]
        if writer not in writers:
            writers[writer] = writer_of(name)
        if writers[writer] is not Writer.ALIVE:
            _remove_leftover(folder / name, writers[writer])


def _remove_leftover(path: Path, writer: Writer) -> None:
    with suppress(OSError):  # harmless: the next write tries again
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        is_old = time.time() - found.st_mtime > _FOREIGN_AGE_SECONDS  # longer than any write takes
        if is_ours and (writer is Writer.DEAD or is_old):
            path.unlink()


def _kind(name: str) -> str | None:
    """Return the kind of a hidden name, "journal" or "tmp"; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or (match["suffix"] and match["kind"] == NOTICE):
        return None
    too_long = len((match["suffix"] or "").encode(errors="surrogateescape")) > _LONGEST_SUFFIX
    return None if too_long else match["kind"]


def _names_in(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.startswith(".amct-")]  # noqa: PTH208 - only names needed
    except (OSError, ValueError):  # opening the file itself gives a better error
        return []


@functools.cache
def _machine() -> str:
    """Return eight hexadecimal digits that identify the machine and its pid namespace (container)."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a name of the kernel, not a file
    except OSError:
        namespace = ""
    return hashlib.blake2s(f"{platform.node()} {namespace}".encode(), digest_size=4).hexdigest()


@functools.cache  # a fork has another pid
def _this_process(pid: int) -> str:
    return f"{pid}-{_start_time(pid) or 0}"


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot; None if it is dead, 0 on systems other than Linux."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        except OSError:
            return 0
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
