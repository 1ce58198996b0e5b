"""Notices of file groups: written before the renames, removed after them, checked by readers, never replayed.

A notice is the file ``.amct-….journal`` with names of files in the same folder::

    {"version": 2, "files": ["net_deploy_model.onnx", "net_quant.json"]}

While it exists, these files may be a mixture of old and new ones.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from amct.atomic._disk import (
    NOTICE,
    TEMPORARY,
    WriterState,
    create,
    file_error,
    new_path,
    notice_names,
    real_path,
    sync_folder,
    writer_of,
)
from amct.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

_VERSION = 2
_MAX_BYTES = 1 << 20
_MAX_NAMES = 500  # names of 255 escaped bytes stay below _MAX_BYTES
_MAX_NAME_BYTES = 255
_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.01


class Notice(NamedTuple):
    """A notice: its path, the names of the files being replaced in its folder, and the user id of its owner."""

    path: Path
    files: frozenset[str]
    owner: int


def check_whole(*paths: str | os.PathLike[str]) -> None:
    """Check before reading files that they are not a mixture of two saves, left by an interrupted save.

    If another process is replacing a file, this waits until it has finished, at most ten seconds. Nothing is changed on
    the disk. Files that do not exist are not an error.

    Raises:
        FileError: The save of a file was interrupted, or does not finish.
    """
    folders: dict[Path, dict[str, Path]] = {}
    for path in paths:
        file = Path(path)
        # A link may be listed itself, because saves replace it, or the file that it points to.
        for listed in {real_path(file.parent) / file.name, real_path(file)}:
            folders.setdefault(listed.parent, {})[listed.name] = file
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for folder, files in folders.items():
        while (notice := next((each for each in notices_in(folder) if each.files & files.keys()), None)) is not None:
            writer = writer_of(notice.path.name)
            if writer is WriterState.DEAD or time.monotonic() > deadline:
                raise interrupted(files[min(notice.files & files.keys())], notice, writer)
            time.sleep(_POLL_SECONDS)


class Snapshot:
    """The state of files that are read one after the other, to detect that a save replaced them meanwhile.

    Creating it waits for a running save of these files and rejects an interrupted one, as ``check_whole`` does.
    """

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        check_whole(*paths)
        self._states = {path: _state(path) for path in map(Path, paths)}

    def check_unchanged(self) -> None:
        """Check that the files are still those of the snapshot.

        Raises:
            FileError: A file was replaced or removed, or a save of it was interrupted.
        """
        check_whole(*self._states)
        for path, state in self._states.items():
            if _state(path) != state:
                raise FileError(f'"{path}" was written by another process while it was read; run this again')


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced or rewritten; None without a file."""
    try:
        about = path.stat()
    except (OSError, ValueError):  # the reader itself reports it
        return None
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def interrupted(path: Path, notice: Notice, writer: WriterState = WriterState.DEAD) -> FileError:
    """Return the error for a file that a notice lists."""
    others = sorted(notice.files - {path.name})
    beside = f" together with {_listed(others)}" if others else ""
    happened = {
        WriterState.DEAD: "was interrupted",
        WriterState.ALIVE: f"has been running for more than {_PATIENCE_SECONDS:.0f} seconds, or failed",
        WriterState.FOREIGN: "was interrupted, or is still running on another machine",
    }[writer]
    return FileError(
        f'"{path}" cannot be used: the save that writes it{beside} {happened}, so the files may be old and new ones '
        f'mixed. Run that save again; or, if you have checked that the files are complete, remove "{notice.path}"'
    )


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(f'"{name}"' for name in names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


def notices_in(folder: Path) -> list[Notice]:
    """Return the notices in a folder; malformed ones are left out with a warning."""
    found = (_read(folder / name) for name in notice_names(folder))
    return [notice for notice in found if notice is not None]


def write_notices(targets: Iterable[Path], written: list[Path]) -> None:
    """Write a notice to each folder of a group with the files about to be replaced, and sync the folders.

    Args:
        targets: The files of the group.
        written: The path of every notice is appended, so that the caller can remove them even after an error.

    Raises:
        FileError: A notice cannot be written.
    """
    folders: dict[Path, list[str]] = {}
    for target in targets:
        folders.setdefault(target.parent, []).append(target.name)
    for folder, names in folders.items():
        for start in range(0, len(names), _MAX_NAMES):
            notice = new_path(folder, NOTICE)
            written.append(notice)
            _write(notice, names[start : start + _MAX_NAMES])
        try:
            sync_folder(folder)  # this also syncs the names of the temporary files
        except OSError as error:
            raise file_error("write to folder", folder, error) from error


def settle(notices: Iterable[Notice], replaced: Iterable[Path]) -> None:
    """Remove replaced files from the notices of interrupted saves; a notice without existing files is deleted.

    Args:
        notices: The notices found in the folders of a group, with the lock held, before its own were written.
        replaced: The files of the group, renamed and synced.
    """
    new = set(replaced)
    for path, files, owner in notices:
        if not any(path.parent / name in new for name in files):
            continue
        if owner != os.geteuid():
            _warn(path, "it belongs to another user; remove it to read the files it lists")
            continue
        left = [name for name in sorted(files) if path.parent / name not in new and os.path.lexists(path.parent / name)]
        with suppress(OSError):  # the old notice then remains, which is safe: it rejects more files than needed
            if left:
                _write(path, left)
            else:
                path.unlink()


def _write(path: Path, names: Sequence[str]) -> None:
    waiting = new_path(path.parent, TEMPORARY)
    try:
        with create(waiting, path) as stream:
            stream.write(json.dumps({"version": _VERSION, "files": list(names)}).encode())
        waiting.replace(path)
    except OSError as error:
        raise error if isinstance(error, FileError) else file_error("write", path, error) from error
    finally:
        waiting.unlink(missing_ok=True)


def _read(path: Path) -> Notice | None:
    """Read a notice; return None if it no longer exists or is malformed."""
    try:
        return Notice(path, *_content(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(path, f"it cannot be read ({(error.strerror or str(error)).lower()})")
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "it is not JSON"
        _warn(path, f"it is not a notice of AMCT, {reason}")
    return None


def _content(path: Path) -> tuple[frozenset[str], int]:
    """Return the names that a notice lists, and its owner; links and special files are rejected."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return _files_of(stream.read(_MAX_BYTES + 1)), about.st_uid
    finally:
        os.close(descriptor)


def _files_of(content: bytes) -> frozenset[str]:
    if len(content) > _MAX_BYTES:
        raise ValueError("it is too large")
    notice = json.loads(content)
    if not isinstance(notice, dict) or notice.keys() != {"version", "files"} or notice["version"] != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    files = notice["files"]
    if not isinstance(files, list) or not files or not all(_is_plain_name(name) for name in files):
        raise ValueError("it does not list plain names of files")
    return frozenset(files)


def _is_plain_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or any(odd in name for odd in ("/", os.sep, "\0")):
        return False
    try:
        return len(os.fsencode(name)) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:  # an unpaired surrogate
        return False


@functools.lru_cache(maxsize=256)
def _warn(path: Path, reason: str) -> None:
    """Log once that a notice is ignored."""
    logger.warning('"%s" is left alone: %s', path, reason)


# -- Renames the files of a group to their final names, protected by notices -------------------------------------------


_LAST = "quant.json"  # renamed last: programs that do not check notices take it as the sign of a complete save


def put_in_place(temporaries: Mapping[Path, Path]) -> None:
    """Rename the files of a group to their final names; the caller has locked the folders. One file needs no notice.

    Args:
        temporaries: The temporary file of each target, all of them complete and synced.

    Raises:
        FileError: A file cannot be renamed. If other files have been renamed already, the notices remain.
    """
    ordered = {
        target: temporaries[target] for target in sorted(temporaries, key=lambda path: path.name.endswith(_LAST))
    }
    earlier = [notice for folder in _folders(ordered) for notice in notices_in(folder)]
    own: list[Path] = []
    try:
        if len(ordered) > 1:
            write_notices(ordered, own)
        _finish(ordered, own, earlier)
    except KeyboardInterrupt:
        if not _untouched(ordered):
            _finish(ordered, own, earlier, again=True)
        raise
    finally:
        if _untouched(ordered):
            for notice in own:
                with suppress(OSError):  # the original error is raised instead
                    notice.unlink()


def _finish(
    temporaries: Mapping[Path, Path], own: Sequence[Path], earlier: Sequence[Notice], *, again: bool = False
) -> None:
    """Rename, sync, and remove the notices; ``again`` completes an interrupted call."""
    target = Path()
    done_before: tuple[type[OSError], ...] = (FileNotFoundError,) if again else ()
    try:
        for target, temporary in temporaries.items():  # kept short: readers may see old and new files
            with suppress(*done_before):
                os.replace(temporary, target)  # noqa: PTH105 - twice as fast as Path.replace
        for target in _folders(temporaries):
            sync_folder(target)
        settle(earlier, temporaries)
        for target in own:
            target.unlink(missing_ok=True)
    except OSError as error:
        raise file_error("finish the write of", target, error) from error


def _folders(targets: Mapping[Path, Path]) -> list[Path]:
    return list(dict.fromkeys(target.parent for target in targets))


def _untouched(temporaries: Mapping[Path, Path]) -> bool:
    """Return whether no file has been renamed yet, that is, all temporary files still exist."""
    return all(temporary.exists() for temporary in temporaries.values())
