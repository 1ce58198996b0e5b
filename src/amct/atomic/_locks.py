"""The lock of a folder, held while its files are renamed or replaced."""

from __future__ import annotations

import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from amct.atomic._disk import file_error
from amct.atomic._names import LOCK_NAME
from amct.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

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
