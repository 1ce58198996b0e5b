"""Basic file operations whose errors name the file and give advice."""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import platform
import re
import secrets
import stat
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock, Timeout

from amct.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

FILE_MODE = 0o666
"""What a new file may allow; as of any program, the umask of the process takes from it."""
_STATUS = Path("/proc/self/status")

_ADVICE = {
    errno.EACCES: "choose another folder or change its permissions",
    errno.EPERM: "choose another folder or change its permissions",
    errno.EROFS: "choose a folder on a writable disk",
    errno.ENOSPC: "free some space and run it again",
    errno.EDQUOT: "free some space and run it again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "one part of the path is a file; choose another folder",
}


def file_error(action: str, path: Path, error: OSError | ValueError) -> FileError:
    """Return the error for a failed operation on a path, with the reason and, if known, advice."""
    code = getattr(error, "errno", None)
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return FileError(f'cannot {action} "{path}": {reason}{advice}')


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an existing file; False for a path that cannot exist, such as one with a name too long."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for such paths


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an existing folder; False for a path that cannot exist."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for such paths


def is_plain_file(path: Path) -> bool:
    """Whether a path is an existing file that may be written, and no link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False


def real_path(path: Path) -> Path:
    """Return a path with all symbolic links resolved."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise file_error("use", path, error) from error


def replaceable(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write, with the links of its folder resolved.

    A link at the path itself is not followed: the file takes its place. Otherwise a link in a folder from elsewhere
    could redirect a write to any file of the user.

    Raises:
        FileError: It cannot be written or replaced.
    """
    wanted = Path(path)
    target = real_path(wanted.parent) / wanted.name
    try:
        is_link = stat.S_ISLNK(target.lstat().st_mode)
        mode = target.stat().st_mode
    except FileNotFoundError:  # a new file, or a link to nothing
        return target
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileError(f'cannot write "{path}": its symbolic links lead back to themselves') from error
        raise file_error("write", wanted, error) from error
    except ValueError as error:
        raise file_error("use", wanted, error) from error
    if stat.S_ISDIR(mode):
        raise FileError(f'cannot write "{path}": it is a folder; give the name of a file')
    if not stat.S_ISREG(mode):
        raise FileError(f'cannot write "{path}": it is a device or a pipe, not a file')
    if not is_link and not os.access(target, os.W_OK):  # the effective permission, which may differ from the mode
        raise FileError(f'cannot write "{path}": it is read-only; remove it or allow writing')
    return target


def warn_of_link(target: Path) -> None:
    """Log that a link is about to be replaced by a file."""
    if target.is_symlink():
        logger.warning('"%s" is a link and is replaced by a file; what it points to is unchanged', target)


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its missing parents; return the missing ones, outermost first."""
    missing: list[Path] = []
    place = folder
    while not place.exists() and place != place.parent:
        missing.insert(0, place)
        place = place.parent
    try:
        for place in missing:
            with suppress(FileExistsError):  # another process created it first
                place.mkdir()
    except OSError as error:
        raise file_error("create folder", place, error) from error
    return missing


@contextmanager
def create(temporary: Path, target: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it at the end; errors name ``target``."""
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(descriptor)
    except OSError as error:
        # An error with another file name comes from the code in the with block.
        if isinstance(error, FileError) or error.filename not in (None, str(temporary), temporary):
            raise
        raise file_error("write", target, error) from error


def _umask() -> int:
    """The umask of this process; a system call can only tell it by changing it, for all threads."""
    with suppress(OSError, StopIteration, ValueError):
        lines = _STATUS.read_text().splitlines()
        return int(next(line.partition(":")[2] for line in lines if line.startswith("Umask:")), 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def seal(temporary: Path, target: Path) -> None:
    """Set the mode of a complete temporary file, whatever its library chose, and sync it; errors name ``target``."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, FILE_MODE & ~_umask())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise FileError(f'"{target}" was announced but never written, so none of its group is') from error
    except OSError as error:
        raise file_error("write", target, error) from error


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(descriptor)


# -- The hidden file names used during writes, which identify the writing process --------------------------------------
#
# They begin with ``.amct-<machine>-<pid>-<start time>-<token>``; the suffix is ``.tmp…`` for a file being written, and
# ``.journal`` for the notice that a group of files is being renamed. ``.amct.lock`` is the lock file of the folder.


LOCK_NAME = ".amct.lock"
NOTICE = "journal"
TEMPORARY = "tmp"

_FOREIGN_AGE_SECONDS = 24 * 3600.0
_LONGEST_SUFFIX = 32
_NAME = re.compile(
    r"\.amct-(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-(?P<start>[0-9]{1,20})-[0-9a-f]{12}"
    rf"\.(?P<kind>{NOTICE}|{TEMPORARY})(?P<suffix>\.[^/]*)?"
)


class WriterState(Enum):
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


def writer_of(name: str) -> WriterState:
    """Return the state of the process that created a hidden file, from the file's name."""
    match = _NAME.fullmatch(name)
    if match is None or match["machine"] != _machine():
        return WriterState.FOREIGN
    return WriterState.ALIVE if _start_time(int(match["pid"])) == int(match["start"]) else WriterState.DEAD


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of dead processes from a folder; only regular files of this user with our names."""
    writers: dict[str, WriterState] = {}  # cached, because a group may have thousands of files of one process
    for name in _names_in(folder):
        if _kind(name) != TEMPORARY:
            continue
        writer = name.rpartition("-")[0]
        if writer not in writers:
            writers[writer] = writer_of(name)
        if writers[writer] is not WriterState.ALIVE:
            _remove_leftover(folder / name, writers[writer])


def _remove_leftover(path: Path, writer: WriterState) -> None:
    with suppress(OSError):  # harmless: the next write tries again
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        is_old = time.time() - found.st_mtime > _FOREIGN_AGE_SECONDS  # longer than any write takes
        if is_ours and (writer is WriterState.DEAD or is_old):
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


# -- The lock of a folder, held while its files are renamed or replaced ------------------------------------------------


_LOCK_PATIENCE_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.01
_CONTENT_PATIENCE_SECONDS = 2.0


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of several folders.

    Raises:
        FileError: A lock cannot be acquired, or the file with its name is not a lock file.
    """
    with ExitStack() as stack:
        for folder in sorted(set(folders)):  # a fixed order prevents deadlocks
            stack.enter_context(_folder_lock(folder))
        yield


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    path = folder / LOCK_NAME
    _check_lock_file(path)
    lock = FileLock(path, timeout=_LOCK_PATIENCE_SECONDS)
    try:
        lock.acquire(poll_interval=_LOCK_POLL_SECONDS)
    except Timeout as error:
        raise FileError(
            f'"{folder}" has been locked by another process for {_LOCK_PATIENCE_SECONDS:.0f} seconds ("{path}"); '
            "end that process and run this again"
        ) from error
    except OSError as error:
        raise file_error("write to folder", folder, error) from error
    try:
        yield
    finally:
        # Removed while held: filelock detects in a waiting process that the file was unlinked, and tries again.
        with suppress(OSError):
            path.unlink()
        lock.release()


def _check_lock_file(path: Path) -> None:
    """Reject a path that is not a lock file: the folder is not trusted, and filelock 4.1 truncates the file it locks.

    A lock file is a regular, empty file. On file systems without ``flock`` it has content while another process holds
    it, so the check waits a short time for the content to disappear.
    """
    deadline = time.monotonic() + _CONTENT_PATIENCE_SECONDS
    while True:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise file_error("write to folder", path.parent, error) from error
        if stat.S_ISREG(found.st_mode) and found.st_size == 0:
            return
        if not stat.S_ISREG(found.st_mode) or time.monotonic() > deadline:
            what = "a file with content" if stat.S_ISREG(found.st_mode) else "a link, a folder or a device"
            raise FileError(
                f'cannot write to folder "{path.parent}": "{path}" is {what}, but a lock file of AMCT is empty; '
                "remove it and run this again"
            )
        time.sleep(_LOCK_POLL_SECONDS)
