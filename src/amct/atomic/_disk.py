"""Basic file operations whose errors name the file and give advice."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from amct.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

FILE_MODE = 0o640
FOLDER_MODE = 0o750

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
                place.chmod(FOLDER_MODE)
    except OSError as error:
        raise file_error("create folder", place, error) from error
    return missing


@contextmanager
def create(temporary: Path, target: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it at the end; errors name ``target``."""
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, FILE_MODE)
            yield stream
            stream.flush()
            if sync:
                os.fsync(descriptor)
    except OSError as error:
        # An error with another file name comes from the code in the with block.
        if isinstance(error, FileError) or error.filename not in (None, str(temporary), temporary):
            raise
        raise file_error("write", target, error) from error


def seal(temporary: Path, target: Path) -> None:
    """Set the mode of a complete temporary file and sync it; errors name ``target``."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, FILE_MODE)
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
