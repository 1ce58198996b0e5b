"""The hidden names that unfinished writes leave in a folder, and whether their writer still lives.

All begin with ``.amct-<machine>-<pid>-<start time>-<token>``; the ending tells ``.tmp…`` (a file to be), ``.journal``
(a group decided) and ``.pointer`` (where the journal of this folder's group is) apart. ``.amct.lock`` is held while
names change.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import sys
import time
from pathlib import Path

from amct.atomic._disk import file_error

LOCK_NAME = ".amct.lock"
JOURNAL = "journal"
POINTER = "pointer"
TEMPORARY = "tmp"

_FOREIGN_AGE_SECONDS = 24 * 3600.0
_LONGEST_SUFFIX = 32
_NAME = re.compile(r"\.amct-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{12}\.(?P<kind>[a-z]+)")


def new_path(folder: Path, kind: str) -> Path:
    """A name in a folder that tells its owner and that nobody else has."""
    pid = os.getpid()
    return folder / f".amct-{_machine()}-{pid}-{_start_time(pid) or 0}-{secrets.token_hex(6)}.{kind}"


def temporary_path(target: Path) -> Path:
    """The temporary name of a target: beside it, and with its suffix, which some libraries look at."""
    suffix = target.suffix if len(target.suffix.encode()) <= _LONGEST_SUFFIX else ""
    return new_path(target.parent, TEMPORARY + suffix)


def names_in(folder: Path) -> list[str]:
    """All our hidden names in a folder; none when the folder does not exist."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise file_error("read folder", folder, error) from error
    return [name for name in names if name.startswith(".amct") and (name == LOCK_NAME or _NAME.match(name))]


def dead_names(folder: Path, names: list[str]) -> list[str]:
    """The temporary files and pointers among our names whose writer is gone."""
    running: dict[str, int | None] = {}  # start time by pid: a group may have thousands of files, but one writer
    dead = []
    for name in names:
        match = _NAME.match(name)
        if match is None or match["kind"] == JOURNAL:
            continue
        if match["machine"] != _machine():
            if _is_old(folder / name):
                dead.append(name)
            continue
        pid = match["pid"]
        if pid not in running:
            running[pid] = _start_time(int(pid))
        if running[pid] != int(match["start"]):
            dead.append(name)
    return dead


def _is_old(path: Path) -> bool:
    """Whether a file of another machine, whose pids cannot be asked for, is older than any write takes."""
    try:
        return time.time() - path.stat().st_mtime > _FOREIGN_AGE_SECONDS
    except OSError:
        return False


@functools.cache
def _machine() -> str:
    """Eight characters for the space in which a pid means something: the machine or, inside one, the container."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a name of the kernel, not a file
    except OSError:
        namespace = ""
    return hashlib.blake2s(f"{platform.node()} {namespace}".encode(), digest_size=4).hexdigest()


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when it is dead, 0 where the system does not tell."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            return 0
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
